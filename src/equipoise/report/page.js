// Draws figures, sorts, filters and pages tables, tells what a word means. Pages work without it, less figures.
"use strict";
const equipoise = (() => {
  const root = document.documentElement, rowsOfPage = 25, fewRows = 8;
  const make = (name, attributes = {}, ...children) => {
    const element = Object.assign(document.createElement(name), attributes);
    element.append(...children);
    return element;
  };
  const decoded = text => Object.assign(document.createElement("textarea"), { innerHTML: text }).value;

  // ---- figures ------------------------------------------------------------------------------------------------

  let loading;
  const load = () => (loading ??= globalThis.Plotly ? Promise.resolve() : (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(make("script", { textContent: await new Response(stream).text() }));
  })());

  // Colours are names of CSS variables after a "$", under keys that speak of colour: other text stays as it is.
  const coloured = (value, key = "") => {
    if (typeof value === "string" && value[0] === "$" && /color/i.test(key))
      return getComputedStyle(root).getPropertyValue("--" + value.slice(1)).trim();
    if (Array.isArray(value)) return value.map(each => coloured(each, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, coloured(each, name)]));
    return value;
  };
  const axis = given => ({
    automargin: true, zeroline: false, gridcolor: "$hair", linecolor: "$rule", tickcolor: "$rule", ticks: "",
    fixedrange: !matchMedia("(pointer: fine)").matches, ...given,
    title: { font: { size: 12 }, standoff: 8, ...given?.title },
  });
  const layoutOf = panel => coloured({
    ...panel.layout, height: panel.height, showlegend: false, hovermode: "closest", dragmode: "zoom",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", margin: { l: 4, r: 12, t: 18, b: 4 },
    font: { family: getComputedStyle(document.body).getPropertyValue("--sans"), size: 12, color: "$ink" },
    hoverlabel: { bgcolor: "$tip", bordercolor: "$rule", font: { color: "$ink", size: 12 }, align: "left" },
    xaxis: axis(panel.layout.xaxis), yaxis: axis(panel.layout.yaxis),
  });
  const drawPanel = (plot, panel, hidden) => Plotly.react(plot,
    coloured(panel.data).map(trace => hidden.has(trace.name) ? { ...trace, visible: false } : trace),
    { ...layoutOf(panel), width: plot.clientWidth || undefined }, { displayModeBar: false, doubleClick: "reset" });

  const figures = [];
  class Figure {
    constructor(place, told) {
      Object.assign(this, { place, page: 0, hidden: new Set(), plots: [] });
      this.keys = make("div", { className: "keys" });
      this.grid = make("div", { className: "grid" });
      place.replaceChildren(this.keys, this.grid);
      this.take(told);
      figures.push(this);
      new ResizeObserver(() => this.drawn && this.width !== this.grid.clientWidth && this.draw()).observe(place);
    }
    take(told) { // new data, for a page that follows a run
      this.told = told;
      this.page = Math.min(this.page, told.pages.length - 1);
      this.grid.style.setProperty("--least", told.least + "px");
      const select = this.place.querySelector("select");
      if (told.choose && select?.options.length !== told.pages.length) this.choice();
      if (this.drawn) this.draw();
    }
    choice() {
      this.place.querySelector("label.choice")?.remove();
      const select = make("select", {}, ...this.told.pages.map((page, i) =>
        make("option", { value: i, textContent: decoded(page.label), selected: i === this.page })));
      select.onchange = () => { this.page = +select.value; this.draw(); };
      this.place.prepend(make("label", { className: "choice" }, this.told.choose + " ", select));
    }
    async draw() {
      await load();
      this.drawn = true;
      this.width = this.grid.clientWidth;
      const panels = this.told.pages[this.page].panels;
      if (this.plots.length !== panels.length) {
        this.plots.forEach(each => Plotly.purge(each));
        this.plots = panels.map(() => make("div", { className: "plot" }));
        this.grid.replaceChildren(...this.plots.map((plot, i) =>
          make("div", {}, make("p", { className: "panel-title" }), plot)));
      }
      panels.forEach((panel, i) => {
        this.plots[i].previousSibling.textContent = decoded(panel.title);
        this.plots[i].previousSibling.hidden = !panel.title;
        drawPanel(this.plots[i], panel, this.hidden);
      });
      this.legend(panels);
      this.place.dataset.drawn = this.page;
      this.place.style.minHeight = "";
    }
    legend(panels) {
      const shown = panels.flatMap(panel => panel.data).filter(trace => trace.showlegend && trace.name);
      const names = new Map(shown.map(trace => [trace.name, trace]));
      if (this.keyed === [...names.keys()].join("\n")) return;
      this.keyed = [...names.keys()].join("\n");
      this.keys.replaceChildren(...(names.size > 1 ? [...names] : []).map(([name, trace]) => {
        const key = make("button", { type: "button", className: "key" }, make("i"), decoded(name));
        const colour = trace.fillcolor ?? trace.marker?.color ?? trace.line?.color;
        key.style.setProperty("--key", typeof colour === "string" ? `var(--${colour.slice(1)})` : "var(--accent)");
        key.classList.toggle("dashed", /dash|dot/.test(trace.line?.dash ?? ""));
        key.setAttribute("aria-pressed", !this.hidden.has(name));
        key.onclick = () => {
          this.hidden.has(name) ? this.hidden.delete(name) : this.hidden.add(name);
          key.setAttribute("aria-pressed", !this.hidden.has(name));
          this.draw();
        };
        return key;
      }));
    }
  }

  const redraw = () => figures.forEach(each => each.drawn && each.draw());
  const drawNear = new IntersectionObserver(entries => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) {
      drawNear.unobserve(target);
      figures.find(each => each.place === target).draw();
    }
  }, { rootMargin: "400px" });
  const figure = (place, told) => { new Figure(place, told); drawNear.observe(place); return figures.at(-1); };

  // ---- tables -------------------------------------------------------------------------------------------------

  const units = { GB: 1e9, MB: 1e6, kB: 1e3, h: 3600, min: 60 };
  const value = cell => {
    const text = (cell?.firstChild?.textContent ?? "").trim().replaceAll(",", "").replace("−", "-");
    if (!/^-?[\d.]/.test(text)) return text === "–" || !text ? undefined : text.toLowerCase();
    if (!/^-?[\d.]+( (±|%|GB|MB|kB|bytes|h|min|s)|[\u2020\u2021]|%|$)/.test(text)) return text.toLowerCase();
    const parts = [...text.split("±")[0].matchAll(/(-?[\d.]+)\s*(GB|MB|kB|h|min)?/g)];
    return parts.reduce((sum, [, number, unit]) => sum + parseFloat(number) * (units[unit] ?? 1), 0);
  };
  const compare = (a, b) => a === undefined ? (b === undefined ? 0 : 1) : b === undefined ? -1
    : typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;

  // Gives a function to call after its rows have changed. `grows`: few rows now may be many later.
  const table = (element, grows = false) => {
    const heads = [...element.tHead.rows[0].cells], bodies = [...element.tBodies];
    const rows = () => bodies.flatMap(body => [...body.rows]).filter(row => !row.classList.contains("group"));
    if (rows().length < 3 && !grows) return;
    let first = 0, wanted = "";
    const said = make("span", { className: "said" }), filter = make("input", { type: "search" });
    said.setAttribute("aria-live", "polite");
    const turn = (text, by) => make("button", { type: "button", textContent: text, onclick: () => { first += by; show(); } });
    const back = turn("Previous", -rowsOfPage), on = turn("Next", rowsOfPage);
    const show = () => {
      const all = rows(), found = all.filter(row => row.textContent.toLowerCase().includes(wanted));
      first = Math.max(0, Math.min(first, found.length - 1));
      const shown = new Set(found.slice(first, first + rowsOfPage));
      all.forEach(row => { row.hidden = !shown.has(row); });
      back.hidden = on.hidden = found.length <= rowsOfPage;
      back.disabled = !first;
      on.disabled = first + rowsOfPage >= found.length;
      said.textContent = found.length === all.length && found.length <= rowsOfPage ? ""
        : found.length ? `${first + 1} to ${first + shown.size} of ${found.length} rows` : "no row has this text";
    };
    filter.oninput = () => { wanted = filter.value.trim().toLowerCase(); first = 0; show(); };
    heads.forEach((head, place) => {
      const button = make("button", { type: "button", className: "sort" });
      button.append(...head.childNodes);
      head.append(button);
      button.onclick = () => {
        const down = head.getAttribute("aria-sort") === "descending" ? 1
          : head.getAttribute("aria-sort") === "ascending" ? -1 : head.classList.contains("number") ? -1 : 1;
        heads.forEach(each => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
        sort();
        show();
      };
    });
    const sort = () => {
      const place = heads.findIndex(head => head.hasAttribute("aria-sort"));
      if (place < 0) return;
      const down = heads[place].getAttribute("aria-sort") === "ascending" ? 1 : -1;
      for (const body of bodies) {
        const own = [...body.rows].filter(row => !row.classList.contains("group"));
        const keyed = own.map(row => [value(row.cells[place]), row]);
        keyed.sort(([a], [b]) => a === undefined || b === undefined ? compare(a, b) : down * compare(a, b));
        body.append(...keyed.map(([, row]) => row));
      }
    };
    const tools = make("div", { className: "tools" }, make("label", {}, "Filter ", filter), said, back, on);
    const refresh = () => {
      if (rows().length > fewRows && !tools.isConnected) element.parentElement.before(tools);
      sort();
      show();
    };
    refresh();
    return refresh;
  };

  // ---- what words mean ----------------------------------------------------------------------------------------

  const tip = make("div", { id: "tip", hidden: true });
  tip.setAttribute("role", "tooltip");
  const tell = event => {
    const word = event.target.closest?.("[data-means]") ?? event.target.querySelector?.(":scope > [data-means]");
    tip.hidden = !word;
    if (!word) return;
    tip.textContent = word.dataset.means;
    const at = word.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (at.bottom + tip.offsetHeight + 8 < innerHeight ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + "px";
  };

  const start = () => {
    document.body.append(tip);
    document.querySelectorAll("table.data").forEach(each => table(each));
    for (const word of document.querySelectorAll("[data-means]")) {
      const holder = word.closest("button") ?? word;
      if (holder === word) word.tabIndex = 0;
      holder.setAttribute(holder === word ? "aria-label" : "aria-description",
        (holder === word ? word.textContent + ": " : "") + word.dataset.means);
      if (holder === word) word.setAttribute("role", "note");
    }
    for (const event of ["mouseover", "focusin"]) document.addEventListener(event, tell);
    document.addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });
    for (const place of document.querySelectorAll("figure > .plots"))
      figure(place, JSON.parse(place.nextElementSibling.textContent));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("beforeprint", () => {
      root.classList.add("printing");
      document.querySelectorAll("details").forEach(each => { each.open = true; });
      figures.forEach(each => each.draw());
    });
    addEventListener("afterprint", () => { root.classList.remove("printing"); redraw(); });
  };
  start();
  return { figure, figures, make, table, load };
})();
