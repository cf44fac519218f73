// Tables: sort by a click on a head, copy, download, and fold what is longer than `MOST` rows.
(() => {
  const MOST = 30;  // as in page.css
  const UNITS = { kB: 1e3, MB: 1e6, GB: 1e9 };
  const NUMBER = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?![\d.])\s*(kB|MB|GB)?/;

  const cells = (row) => [...row.cells].map((cell) => cell.textContent.trim());
  const number = (text) => {
    const found = NUMBER.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : null;
  };
  const absent = (text) => text === "" || text === "–";

  // Numbers in numeric order if the whole column has them, else text; empty cells always last.
  const sort = (table, column, sign) => {
    const body = table.tBodies[0], rows = [...body.rows].map((row) => ({ row, text: cells(row)[column] }));
    const numeric = rows.every(({ text }) => absent(text) || number(text) !== null);
    rows.sort((a, b) => {
      if (absent(a.text) || absent(b.text)) return absent(a.text) - absent(b.text);
      return sign * (numeric ? number(a.text) - number(b.text) : a.text.localeCompare(b.text, "en", { numeric: true }));
    });
    body.append(...rows.map(({ row }) => row));
  };

  const lines = (table, quote, separator) => [...table.rows].map((row) => cells(row).map(quote).join(separator)).join("\n") + "\n";
  const csv = (table) => lines(table, (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text), ",");

  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");  // where a page that is a file has no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };

  const download = (text, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = `${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "table"}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const make = (label, act) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", () => act(button));
    return button;
  };

  document.querySelectorAll("table").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = make("", () => {
        const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
        [...head.parentNode.cells].forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        sort(table, column, sign);
      });
      button.title = "Sort";
      button.append(...head.childNodes);
      head.append(button);
    });

    const tools = document.createElement("div"), count = table.tBodies[0].rows.length;
    tools.className = "tools";
    if (count > MOST) {
      table.classList.add("folded");
      tools.append(make(`Show all ${count} rows`, (button) => {
        const folded = table.classList.toggle("folded");
        button.textContent = folded ? `Show all ${count} rows` : `Show ${MOST} rows`;
      }));
    }
    tools.append(
      make("Copy", async (button) => {
        // Cells separated by tabs paste into a spreadsheet as cells.
        const done = await copy(lines(table, (text) => text.replaceAll("\t", " "), "\t")).then(() => "Copied", () => "Not allowed");
        button.textContent = done;
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      }),
      make("CSV", () => download(csv(table), table.caption.textContent)),
    );
    table.closest(".scroll").after(tools);
  });
})();
