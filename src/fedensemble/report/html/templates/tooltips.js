// What the drawings say at the pointer or at the arrow keys, and legends whose entries hide their line.
(() => {
  const tip = document.getElementById("tip");
  const near = (list, value) => list.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(list[best] - value) ? i : best), 0);
  const clamp = (value, most) => Math.max(0, Math.min(most, value));

  // Of each kind of drawing: how many things it has, which is under a point, how far an arrow key goes, what to say of one.
  const kinds = {
    x: {
      count: (h) => h.at.length,
      find: (h, x) => near(h.at, x),
      steps: () => ({ ArrowLeft: -1, ArrowRight: 1 }),
      show: (h, i) => ({
        box: [h.at[i] - 0.5, h.top, 1, h.bottom - h.top],
        text: [h.label[i], ...h.rows.filter(([name]) => !h.hidden.has(name)).map(([name, values]) => `${name}: ${values[i]}`)].join("\n"),
      }),
    },
    bar: {
      count: (h) => h.boxes.length,
      find: (h, x) => h.boxes.findIndex(([left, , w]) => x >= left && x <= left + w),
      steps: () => ({ ArrowLeft: -1, ArrowRight: 1 }),
      show: (h, i) => ({ box: h.boxes[i], text: h.text[i] }),
    },
    point: {
      count: (h) => h.boxes.length,
      find: (h, x, y) => {
        const far = h.boxes.map(([left, top, w, tall]) => Math.hypot(x - left - w / 2, y - top - tall / 2));
        const best = near(far, 0);
        return far[best] < 20 ? best : -1;
      },
      steps: () => ({ ArrowLeft: -1, ArrowRight: 1 }),
      show: (h, i) => ({ box: h.boxes[i], text: h.text[i] }),
    },
    grid: {
      count: (h) => h.rows.length * h.columns.length,
      find: (h, x, y) => {
        const r = Math.floor((y - h.y) / h.h), c = Math.floor((x - h.x) / h.w);
        return r < 0 || c < 0 || r >= h.rows.length || c >= h.columns.length ? -1 : r * h.columns.length + c;
      },
      steps: (h) => ({ ArrowLeft: -1, ArrowRight: 1, ArrowUp: -h.columns.length, ArrowDown: h.columns.length }),
      show: (h, i) => {
        const r = Math.floor(i / h.columns.length), c = i % h.columns.length, count = h.counts[r][c];
        const whole = (h.share === "row" ? h.counts[r] : h.counts.map((line) => line[c])).reduce((sum, v) => sum + v, 0);
        const share = whole ? (100 * count / whole).toFixed(1) : "0";
        return {
          box: [h.x + c * h.w, h.y + r * h.h, h.w, h.h],
          text: `${h.row} ${h.rows[r]}, ${h.column} ${h.columns[c]}\n${count.toLocaleString("en")} examples, ${share} % of this ${h[h.share]}`,
        };
      },
    },
  };

  document.querySelectorAll("svg.chart").forEach((svg) => {
    const hover = JSON.parse(svg.dataset.hover);
    const kind = kinds[hover.kind];
    hover.hidden = new Set();
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    mark.setAttribute("class", "hit");
    let at = -1;

    const hide = () => { mark.remove(); tip.hidden = true; at = -1; };
    const show = (index) => {
      if (index < 0 || !kind.count(hover)) { hide(); return; }
      at = index;
      const { box: [x, y, w, h], text } = kind.show(hover, index);
      Object.entries({ x, y, width: w, height: h }).forEach(([name, value]) => mark.setAttribute(name, value));
      if (mark.parentNode !== svg) svg.append(mark);
      tip.textContent = text;
      tip.hidden = false;
      const place = mark.getBoundingClientRect(), size = tip.getBoundingClientRect();
      const right = place.right + 10;
      tip.style.left = `${clamp(right + size.width > innerWidth ? place.left - size.width - 10 : right, innerWidth - size.width)}px`;
      tip.style.top = `${clamp(place.top + Math.min(place.height / 4, 40), innerHeight - size.height)}px`;
    };

    const point = (event) => {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      show(kind.find(hover, x, y));
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = kind.steps(hover)[event.key];
      if (event.key === "Escape") hide();
      if (step === undefined) return;
      event.preventDefault();
      show(at < 0 ? 0 : clamp(at + step, kind.count(hover) - 1));
    });

    // An entry of the legend becomes a button if the drawing marks the shapes that belong to it.
    svg.closest("figure").querySelectorAll(".legend li").forEach((entry, index) => {
      const shapes = svg.querySelectorAll(`[data-series="${index}"]`);
      if (!shapes.length) return;
      const button = document.createElement("button"), name = entry.textContent.trim();
      button.type = "button";
      button.title = "Hide or show";
      button.setAttribute("aria-pressed", "true");
      button.append(...entry.childNodes);
      entry.append(button);
      button.addEventListener("click", () => {
        const shown = hover.hidden.delete(name);
        if (!shown) hover.hidden.add(name);
        button.setAttribute("aria-pressed", shown);
        shapes.forEach((shape) => shape.classList.toggle("off", !shown));
      });
    });
  });
})();
