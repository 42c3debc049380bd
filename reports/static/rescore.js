// Judges the page's requests again by other limits; rows.js reads them.
"use strict";
(() => {
  const section = document.getElementById("rescoring");
  if (!section) return;
  const { held, three } = window.slobench;
  const STEPS = 1000;

  function kept(columns, limits, k) {
    return columns.answered[k] === 1 && limits.every((limit) => {
      const value = columns[limit.metric][k];
      return value <= limit.ms * 1e-3 || (limit.passes_undefined && Number.isNaN(value));
    });
  }

  // Wilson's score interval over due / time requests, as `proportions.wilson` has it.
  function share(met, due, times) {
    const z2 = held.z ** 2, p = met / due;
    if (!times) return [p, null, null];
    const bound = (time, sign) => {
      const n = due / time;
      const half = Math.sqrt((p * (1 - p)) / n + z2 / (4 * n * n));
      return (p + z2 / (2 * n) + sign * held.z * half) / (1 + z2 / n);
    };
    return [p, met === 0 ? 0 : bound(times[0], -1), met === due ? 1 : bound(times[1], 1)];
  }

  // As `wording.format_share`: near 100 % two digits of the distance, so that 99.96 % is not 100 %.
  function percent(value) {
    const rest = 100 - 100 * value;
    if (rest > 50) return `${three(100 * value)} %`;
    const place = Math.floor(Math.log10(rest));
    let digits = rest > 0 ? Math.max(1, Math.min(2, 1 - place)) : 1;
    if (rest > 0 && rest < 0.01) digits = Math.min(9, -place);
    return `${Number((100 * value).toFixed(digits))} %`;
  }

  function row(name, met, due, times, hasLimit) {
    const [value, low, high] = share(met, due, times);
    const interval = low === null ? "open" : `[${percent(low)}, ${percent(high)}]`;
    const goodput = met / held.length_s;
    const cells = [
      ["th", name],
      ["td", met, met],
      ["td", due, due],
      hasLimit ? ["td", percent(value), value] : ["td", "n/a: no per-request limit"],
      ["td", hasLimit ? interval : "–"],
      ["td", `${three(goodput)}/s`, goodput],
    ];
    const line = document.createElement("tr");
    for (const [tag, text, exact] of cells) {
      const cell = document.createElement(tag);
      if (tag === "th") cell.scope = "row";
      if (exact !== undefined) cell.dataset.value = exact;
      cell.textContent = text;
      line.append(cell);
    }
    return line;
  }

  function judged(columns, limits) {
    const groups = held.classes.map(() => ({ met: 0, due: 0 }));
    for (let k = 0; k < held.n; k++) {
      const group = groups[columns.class_id[k]];
      group.due += 1;
      group.met += kept(columns, limits, k);
    }
    const all = groups.reduce((sum, g) => ({ met: sum.met + g.met, due: sum.due + g.due }));
    const hasLimit = limits.length > 0;
    const lines = [row("all requests", all.met, all.due, held.times, hasLimit)];
    if (groups.length > 1) {
      groups.forEach((g, k) => {
        if (g.due) lines.push(row(held.classes[k], g.met, g.due, held.class_times[k], hasLimit));
      });
    }
    return lines;
  }

  function csv(columns, limits) {
    const names = ["released_s", ...held.limits.map((limit) => limit.metric), "output_tokens"];
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const lines = [["request_id", "class", "status", ...names, "kept"].join(",")];
    for (let k = 0; k < held.n; k++) {
      const values = names.map((name) => (Number.isNaN(columns[name][k]) ? "" : columns[name][k]));
      const words = [columns.request_id[k], quoted(held.classes[columns.class_id[k]])];
      lines.push([...words, held.statuses[columns.status[k]], ...values, kept(columns, limits, k)].join(","));
    }
    return `${lines.join("\n")}\n`;
  }

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // A slider's places are even on a logarithmic scale; the number beside it is what counts.
  function connect(limit, changed) {
    const [box, slider, number] = section.querySelectorAll(`[data-metric="${limit.metric}"] input`);
    const span = Math.log(limit.most_ms / limit.least_ms);
    const place = (ms) => Math.round((STEPS * Math.log(ms / limit.least_ms)) / span);
    const start = limit.asked_ms ?? Math.sqrt(limit.least_ms * limit.most_ms);
    number.value = limit.asked_ms === null ? three(start) : Number(start.toPrecision(12));
    slider.max = STEPS;
    slider.value = place(start);
    slider.addEventListener("input", () => {
      number.value = three(limit.least_ms * Math.exp((span * slider.value) / STEPS));
      box.checked = true;
      changed();
    });
    number.addEventListener("input", () => {
      if (number.valueAsNumber > 0) slider.value = place(number.valueAsNumber);
      box.checked = number.valueAsNumber > 0;
      changed();
    });
    box.addEventListener("change", changed);
    return () => (box.checked ? [{ ...limit, ms: number.valueAsNumber }] : []);
  }

  async function begin() {
    const columns = await window.slobench.columns;
    const body = section.querySelector("tbody");
    const command = section.querySelector("[data-command]");
    let limits = [];
    function update() {
      limits = asked.flatMap((ask) => ask());
      body.replaceChildren(...judged(columns, limits));
      const flags = limits.map((limit) => ` --slo '${limit.word} <= ${limit.ms}ms'`).join("");
      command.textContent = `${command.dataset.command}${flags}`;
    }
    const asked = held.limits.map((limit) => connect(limit, update));
    section.querySelector("[data-save=csv]").addEventListener("click", () => {
      save(`${held.run}.csv`, "text/csv", csv(columns, limits));
    });
    section.querySelector("[data-save=json]").addEventListener("click", () => {
      save(`${held.run}.json`, "application/json", document.getElementById("summary").textContent);
    });
    update();
    section.hidden = false;
    document.documentElement.dataset.rescored = "ready";
  }

  begin().catch((problem) => console.error("the requests could not be read", problem));
})();
