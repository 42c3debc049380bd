// Draws the figures of the page: the specifications are data in #figures, the library is above.
"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const options = {
    ast: true, // expressions are interpreted, so the page needs no eval
    renderer: "svg",
    actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
  };
  const axisSpace = 114; // of an axis with its title, and of the menu; a picture that is scaled misplaces a brush
  const views = {};

  // "fit" is the width of the page; Vega-Lite knows that for single views only.
  function fitted(spec, width) {
    if (!spec.vconcat) return spec;
    return { ...spec, vconcat: spec.vconcat.map((panel) => ({ ...panel, width })) };
  }

  // What the library leaves without a name, for those who hear the page.
  function named(element) {
    element.querySelector("summary")?.setAttribute("aria-label", "Save this chart");
    for (const brush of element.querySelectorAll('[class*="_brush"]')) brush.setAttribute("aria-hidden", "true");
  }

  function draw(name, element) {
    const width = Math.max(160, element.clientWidth - axisSpace);
    const shown = vegaEmbed(element, fitted(specs[name], width), options);
    return shown.then((result) => {
      views[name] = result.view;
      named(element);
      if (has(name, "shown")) brushed(element, result.view);
    }).catch((problem) => {
      element.textContent = `This chart could not be drawn: ${problem.message}`;
      console.error(name, problem);
    });
  }

  const has = (name, param) => (specs[name].params || []).some((one) => one.name === param);

  // The stretch of the run that all strips show, null for all of it.
  let stretch = null;
  const zoom = document.querySelector("[data-zoom]");

  function show(wanted) {
    stretch = wanted;
    const [from, to] = wanted || [0, Number(zoom.dataset.zoom)];
    const short = (seconds) => Number(seconds.toPrecision(6));
    [from, to].forEach((at, k) => { zoom.querySelectorAll("input")[k].value = short(at); });
    for (const [name, view] of Object.entries(views)) {
      if (has(name, "shown")) view.signal("shown", stretch).runAsync();
    }
  }

  // What was dragged over in one strip is shown by all once the button is let go: an axis that moved
  // meanwhile would change what is dragged over.
  function brushed(element, view) {
    if (stretch) view.signal("shown", stretch).runAsync();
    element.ondblclick = () => show(null);
    element.onpointerdown = () => {
      element.classList.add("brushing");
      window.addEventListener("pointerup", () => setTimeout(() => {
        element.classList.remove("brushing");
        const [ends] = Object.values(view.signal("brush") || {});
        if (ends && ends[0] < ends[1]) show([Math.max(0, ends[0]), ends[1]]);
      }), { once: true });
    };
  }

  if (zoom) {
    const inputs = [...zoom.querySelectorAll("input")];
    zoom.addEventListener("change", () => {
      const [from, to] = inputs.map((input) => input.valueAsNumber);
      if (from >= 0 && from < to) show([from, to]);
    });
    zoom.querySelector("button").addEventListener("click", () => show(null));
  }

  // Sections are folded by relevance; a figure in a folded section has no width, so it is drawn when
  // the section opens. "#unfolded" opens all of them, for pictures of the whole page.
  const folds = [...document.querySelectorAll("details.fold")];
  const isFolded = (element) => element.closest("details.fold:not([open])") !== null;
  const openAll = () => { for (const fold of folds) fold.open = true; };
  if (location.hash === "#unfolded") openAll();

  function openTarget() {
    const fold = document.getElementById(location.hash.slice(1))?.closest("details.fold");
    if (fold) fold.open = true;
  }
  openTarget();
  window.addEventListener("hashchange", openTarget);
  // Print waits for no later task, so the figures of the sections that it opens are drawn at once.
  window.addEventListener("beforeprint", () => {
    openAll();
    Object.keys(specs).forEach(drawFitting);
  });

  function contents() {
    const main = document.querySelector("main");
    const heads = [...main.querySelectorAll("h2[id]")];
    if (heads.length < 3) return;
    const nav = document.createElement("nav"), list = document.createElement("ol");
    const menu = document.createElement("details"), word = document.createElement("summary");
    nav.className = "contents";
    word.textContent = "Contents";
    const isWide = matchMedia("(min-width: 40.01rem)"); // a narrow screen has a menu (page.css)
    menu.open = isWide.matches;
    isWide.addEventListener("change", () => { menu.open = isWide.matches; });
    nav.setAttribute("aria-label", "Contents");
    for (const head of heads) {
      const item = document.createElement("li"), link = document.createElement("a");
      link.href = `#${head.id}`;
      link.textContent = head.closest(".banner") ? "Result" : head.textContent;
      link.addEventListener("click", () => {
        const fold = head.closest("details.fold");
        if (fold) fold.open = true;
        menu.open = isWide.matches;
      });
      item.append(link);
      list.append(item);
    }
    menu.append(word, list);
    nav.append(menu);
    if (folds.length) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Open all";
      button.addEventListener("click", openAll);
      nav.append(button);
    }
    main.before(nav);
  }
  contents();

  // On a narrow screen a row of a table is a card (page.css): its cells bear the names of their
  // columns. Explicit roles outlive the other layout. A table that a script fills is named anew.
  const LONG = 40; // characters that need the width of the card
  function asCards(table) {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    if (names.length < 3) return;
    table.classList.add("cards");
    table.setAttribute("role", "table");
    function label() {
      for (const row of [...table.tBodies].flatMap((body) => [...body.rows])) {
        row.setAttribute("role", "row");
        [...row.cells].forEach((cell, k) => {
          cell.setAttribute("role", cell.scope === "row" ? "rowheader" : "cell");
          cell.dataset.label = names[k];
          cell.classList.toggle("long", cell.textContent.length > LONG);
        });
      }
    }
    label();
    new MutationObserver(label).observe(table, { childList: true, subtree: true });
  }
  for (const table of document.querySelectorAll(".scroll table")) if (table.tHead) asCards(table);

  // The explanation of a word opens by itself (a popover); a wide screen shows it beside the button.
  function beside(button) {
    const word = document.getElementById(button.getAttribute("popovertarget"));
    if (innerWidth < 640 || !word.matches(":popover-open")) return;
    const at = button.getBoundingClientRect(), box = word.getBoundingClientRect();
    const below = at.bottom + 8, isBelow = below + box.height < innerHeight;
    const top = isBelow ? below : Math.max(8, at.top - box.height - 8);
    const left = Math.min(at.left, document.documentElement.clientWidth - box.width - 8);
    Object.assign(word.style, { inset: "auto", margin: "0", top: `${top}px`, left: `${left}px` });
  }
  for (const button of document.querySelectorAll(".help")) {
    button.addEventListener("click", () => requestAnimationFrame(() => beside(button)));
  }

  const drawn = [], widths = {};
  function drawFitting(name) {
    const element = document.getElementById(name);
    if (!element || isFolded(element) || widths[name] === element.clientWidth) return;
    widths[name] = element.clientWidth;
    drawn.push(draw(name, element));
  }
  Object.keys(specs).forEach(drawFitting);
  for (const fold of folds) {
    fold.addEventListener("toggle", () => {
      if (!fold.open) return;
      for (const element of fold.querySelectorAll(".chart")) drawFitting(element.id);
      window.dispatchEvent(new Event("resize")); // a figure whose window was resized while it was folded
    });
  }

  let width = document.body.clientWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const [name, spec] of Object.entries(specs)) {
        const element = document.getElementById(name);
        if (!spec.vconcat || !element || isFolded(element)) continue;
        widths[name] = element.clientWidth;
        draw(name, element);
      }
    }, 200);
  });

  // A group of radio buttons sets the signal it names in every figure that has it.
  for (const group of document.querySelectorAll("[data-signal]")) {
    const signal = group.dataset.signal;
    group.addEventListener("change", (event) => {
      for (const [name, view] of Object.entries(views)) {
        if (has(name, signal)) view.signal(signal, event.target.value).runAsync();
      }
    });
  }

  Promise.all(drawn).then(() => {
    document.documentElement.dataset.height = String(document.documentElement.scrollHeight);
    document.documentElement.dataset.drawn = String(drawn.length);
  });
})();
