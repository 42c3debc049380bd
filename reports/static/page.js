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

  // "fit" is the width of the page; Vega-Lite knows that for single views only.
  function fitted(spec, width) {
    if (!spec.vconcat) return spec;
    return { ...spec, vconcat: spec.vconcat.map((panel) => ({ ...panel, width })) };
  }

  function draw(name, element) {
    const width = Math.max(160, element.clientWidth - axisSpace);
    return vegaEmbed(element, fitted(specs[name], width), options).catch((problem) => {
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
      const timeline = document.getElementById("timeline");
      if (timeline) draw("timeline", timeline);
    }, 200);
  });

  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = String(drawn.length); });
})();
