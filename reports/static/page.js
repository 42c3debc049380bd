// Draws the figures of the page: the specifications are data in #figures, the library is above.
"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const options = {
    ast: true, // expressions are interpreted, so the page needs no eval
    renderer: "svg",
    actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
  };
  const axisSpace = 70;
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
    }).catch((problem) => {
      element.textContent = `This chart could not be drawn: ${problem.message}`;
      console.error(name, problem);
    });
  }

  const drawn = [];
  for (const [name] of Object.entries(specs)) {
    const element = document.getElementById(name);
    if (element) drawn.push(draw(name, element));
  }

  let width = document.body.clientWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const [name, spec] of Object.entries(specs)) {
        if (spec.vconcat) draw(name, document.getElementById(name));
      }
    }, 200);
  });

  // A group of radio buttons sets the signal it names in every figure that has it.
  for (const group of document.querySelectorAll("[data-signal]")) {
    const signal = group.dataset.signal;
    group.addEventListener("change", (event) => {
      for (const [name, view] of Object.entries(views)) {
        const has = (specs[name].params || []).some((param) => param.name === signal);
        if (has) view.signal(signal, event.target.value).runAsync();
      }
    });
  }

  Promise.all(drawn).then(() => { 
    document.documentElement.dataset.height = String(document.documentElement.scrollHeight);
    document.documentElement.dataset.drawn = String(drawn.length);
  });
})();
