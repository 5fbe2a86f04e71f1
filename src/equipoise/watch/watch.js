// Follows what the server tells: takes each new state into figures and tables that stay as the reader left them.
"use strict";
(() => {
  const { make, figure, table } = equipoise;
  const place = id => document.getElementById(id);
  const figures = {}, tables = {};
  const cells = (texts, numbers) => texts.map((text, i) =>
    Object.assign(make(i ? "td" : "th", { textContent: text }), i >= numbers ? { className: "number" } : {}));

  const newTable = (name, told) => {
    const body = make("tbody"), heads = cells(told.heads, told.numbers).map(cell => {
      const head = make("th", { textContent: cell.textContent, className: cell.className });
      head.scope = "col";
      return head;
    });
    const element = make("table", { className: "data" }, make("caption", {}, make("span", { textContent: told.caption })),
      make("thead", {}, make("tr", {}, ...heads)), body);
    const wide = make("div", { className: "wide", tabIndex: 0 }, element);
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", told.caption);
    place("tables").append(wide);
    element.id = name;
    return { element, body, refresh: table(element, true) };
  };

  const take = state => {
    place("kicker").textContent = state.kicker;
    place("title").textContent = state.title;
    document.title = `${state.title} · Equipoise`;
    if (place("status").textContent !== state.status) place("status").textContent = state.status;
    place("facts").replaceChildren(...state.facts.map(([title, value, remark]) => make("div", {},
      make("b", { textContent: value }), make("em", { textContent: title }), make("small", { textContent: remark }))));
    for (const [name, told] of Object.entries(state.figures)) {
      if (figures[name]) { figures[name].take(told); continue; }
      const plots = make("div", { className: "plots" });
      plots.setAttribute("role", "group");
      plots.setAttribute("aria-label", told.pages[0].panels[0].title);
      plots.style.minHeight = told.pages[0].panels[0].height + "px";
      place("figures").append(make("figure", { id: name }, plots));
      figures[name] = figure(plots, told);
    }
    for (const [name, told] of Object.entries(state.tables)) {
      if (!told.rows.length && !tables[name]) continue;
      tables[name] ??= newTable(name, told);
      tables[name].body.replaceChildren(...told.rows.map(row => make("tr", {}, ...cells(row, told.numbers))));
      tables[name].body.querySelectorAll("th").forEach(each => { each.scope = "row"; });
      tables[name].refresh();
    }
    place("texts").replaceChildren(state.warnings.length
      ? make("ul", { className: "warnings" }, ...state.warnings.map(text => make("li", { textContent: text })))
      : make("p", { textContent: "No warnings." }));
  };

  const source = new EventSource("/events");
  source.addEventListener("state", event => {
    take(JSON.parse(event.data));
    place("seen").textContent = "live, " + new Date().toLocaleTimeString();
  });
  source.onerror = () => { place("seen").textContent = source.readyState === 2
    ? "the watch command has ended" : "connection lost; trying again"; };
})();
