// A button for the theme: the browser's, light or dark. The choice holds for all reports that the browser may remember it for.
(() => {
  const root = document.documentElement, key = "fedensemble-theme", themes = ["auto", "light", "dark"];
  const button = document.createElement("button");
  // Some browsers forbid storage to pages that are files.
  const recall = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem(key, theme); } catch { /* the choice holds for this page only */ } };
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.type = "button";
  button.id = "theme";
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    show(next);
    remember(next);
  });
  show(themes.includes(recall()) ? recall() : "auto");
  document.querySelector("header").prepend(button);
})();
