// One request by its number: what it was given, and why it waited where the engine told.
"use strict";
(() => {
  const section = document.getElementById("lookup");
  if (!section) return;
  const { held, three } = window.slobench;

  const seconds = (value) => {
    if (Number.isNaN(value)) return "–";
    return value < 1 ? `${three(value * 1e3)} ms` : `${three(value)} s`;
  };

  function cells(columns, k) {
    const latencies = held.limits.map((limit) => [limit.title, seconds(columns[limit.metric][k])]);
    return [
      ["class", held.classes[columns.class_id[k]]],
      ["status", held.statuses[columns.status[k]].replaceAll("_", " ")],
      ["released at", seconds(columns.released_s[k])],
      ["output tokens", String(columns.output_tokens[k])],
      ...latencies,
    ];
  }

  function line(name, text) {
    const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
    head.scope = "row";
    [head.textContent, cell.textContent] = [name, text];
    row.append(head, cell);
    return row;
  }

  async function begin() {
    const [columns, why] = await Promise.all([window.slobench.columns, window.slobench.sentences()]);
    const input = section.querySelector("input"), answer = section.querySelector("output");
    const body = section.querySelector("tbody");
    function look() {
      const k = columns.request_id.indexOf(input.valueAsNumber);
      const said = k < 0 ? "" : why[k];
      body.replaceChildren(...(k < 0 ? [] : cells(columns, k)).map(([name, text]) => line(name, text)));
      if (k < 0) answer.textContent = `No due request has the number ${input.value}.`;
      else answer.textContent = said ? `Request ${input.value} ${said}.` : section.dataset.unknown;
    }
    input.max = columns.request_id.at(-1);
    input.addEventListener("change", look);
    section.hidden = false;
    document.documentElement.dataset.lookup = "ready";
  }

  begin().catch((problem) => console.error("the requests could not be read", problem));
})();
