// A report that is served while its run trains: shows the new page in place of the old one, as the reader has left it.
(() => {
  const status = document.getElementById("live"), script = document.querySelector("script").textContent;
  const caption = (element) => element.closest("figure, .beside")?.querySelector("figcaption, caption")?.textContent ?? "";
  const tables = () => [...document.querySelectorAll("table")];
  const entries = (pressed) => [...document.querySelectorAll(`.legend button[aria-pressed=${pressed}]`)];
  const name = (entry) => caption(entry) + entry.textContent.trim();

  // What the reader has changed, and how to change it again.
  const remember = () => {
    const open = new Set([...document.querySelectorAll("details[open]")].map(caption));
    const hidden = new Set(entries(false).map(name));
    const unfolded = new Set(tables().filter((t) => !t.classList.contains("folded")).map((t) => t.caption.textContent));
    const sorted = tables().flatMap((table) => [...table.tHead.rows[0].cells].filter((head) => head.hasAttribute("aria-sort")).map((head) => (
      { table: table.caption.textContent, column: head.cellIndex, clicks: head.getAttribute("aria-sort") === "descending" ? 1 : 2 })));
    const focused = document.activeElement?.id, at = scrollY;
    return () => {
      document.querySelectorAll("details").forEach((each) => { each.open = open.has(caption(each)); });
      entries(true).filter((entry) => hidden.has(name(entry))).forEach((entry) => entry.click());
      tables().forEach((table) => {
        const title = table.caption.textContent;
        if (unfolded.has(title)) table.classList.remove("folded");
        sorted.filter((each) => each.table === title).forEach(({ column, clicks }) => {
          for (let i = 0; i < clicks; i++) table.tHead.rows[0].cells[column]?.querySelector("button")?.click();
        });
      });
      if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
      scrollTo({ top: at, behavior: "instant" });
    };
  };

  const update = async () => {
    const answer = await fetch("/");
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html"), restore = remember();
    document.title = page.title;
    document.getElementById("tip").hidden = true;
    ["header", "main"].forEach((part) => document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part))));
    // The scripts of the page set up the new elements.
    const again = document.createElement("script");
    again.textContent = script;
    document.body.append(again);
    again.remove();
    restore();
  };

  const events = new EventSource(`/events?seen=${document.body.dataset.version}`);
  events.addEventListener("update", update);
  const say = (text, lost) => { status.textContent = text; status.classList.toggle("lost", lost); };
  events.addEventListener("open", () => say("Live", false));
  events.addEventListener("error", () => say("Not connected: start fedensemble watch again", true));
})();
