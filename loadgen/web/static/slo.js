// The LLM SLO panel: on Locust's page under ?tab=slo, or alone at /slo/. Vega-Lite draws the charts.
(() => {
  "use strict";
  const POLL_MS = 1000;
  const LATENCIES = [
    ["ttft", "TTFT"], ["tpot", "TPOT"], ["itl", "ITL (≤)"], ["e2e", "E2E"], ["lateness", "Send lateness"],
  ];
  const QUANTILES = ["p50", "p90", "p99", "p999", "max"];
  const STATUSES = [
    "ok", "http_error", "timeout", "stream_error", "connect_error", "cancelled", "dropped",
    "not_released", "lost", "open",
  ];
  const base = document.currentScript.src.replace(/slo\.js.*$/, "");
  const alone = document.getElementById("slo-alone");
  const isDark = () => alone
    ? matchMedia("(prefers-color-scheme: dark)").matches
    : (localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "")) === "dark";

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const duration = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 1e-3) return `${(seconds * 1e6).toPrecision(3)} µs`;
    if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
    return `${seconds.toPrecision(3)} s`;
  };
  const number = (value) => value === null || value === undefined ? "–" : value.toFixed(1);

  const verdict = element("p", { id: "slo-verdict" });
  const banner = element("div", { id: "slo-banner" });
  const warning = element("p", { id: "slo-warning", hidden: true });
  verdict.setAttribute("role", "status");
  const reasons = element("ul", { id: "slo-reasons" });
  const facts = element("p", { id: "slo-facts" });
  const ledger = element("p", { id: "slo-ledger" });
  const slos = element("table", { id: "slo-results", hidden: true, tabIndex: 0 });
  const table = element("table", { id: "slo-table", tabIndex: 0 });
  const charts = element("div", { id: "slo-charts" });
  const style = element("style", {
    textContent: `
      #slo { overflow-wrap: anywhere; padding: 1rem 0; }
      #slo-banner { border-left: .5rem solid #78909c; border-radius: .25rem; background: #78909c22; padding: .5rem 1rem; }
      #slo-banner.good { border-color: #2e7d32; background: #2e7d3222; }
      #slo-banner.bad { border-color: #c62828; background: #c6282822; }
      #slo-banner.open { border-color: #b26a00; background: #b26a0022; }
      #slo-verdict { font-size: 1.25rem; font-weight: 600; margin: 0 0 .25rem; }
      #slo .bad { color: #b71c1c; } #slo .good { color: #1b5e20; }
      #slo .open { color: #6b3f00; } #slo.dark .open { color: #ffcc80; }
      #slo.dark .bad { color: #ef9a9a; } #slo.dark .good { color: #a5d6a7; }
      #slo-warning { color: #b71c1c; font-weight: 600; } #slo.dark #slo-warning { color: #ef9a9a; }
      #slo-results .bar { background: #8884; border-radius: 2px; height: .6rem; width: 8rem; }
      #slo-results .bar > i { border-radius: 2px; display: block; height: 100%; }
      #slo p, #slo ul { margin: .25rem 0; }
      #slo table[hidden] { display: none; }
      #slo table { border-collapse: collapse; display: block; margin: 1rem 0; overflow-x: auto; font-variant-numeric: tabular-nums; }
      #slo th, #slo td { white-space: nowrap; border-bottom: 1px solid #8886; padding: .25rem 1rem .25rem 0; text-align: right; }
      @media (min-width: 60rem) { #slo-results td { white-space: normal; overflow-wrap: normal; } }
      #slo th:first-child { text-align: left; }
      #slo-charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
      #slo-charts > div { height: 210px; overflow: hidden; width: 100%; }`,
  });
  const panel = element("section", { id: "slo" }, style, banner, slos, facts, ledger, table, charts);
  panel.setAttribute("aria-label", "LLM SLO");
  banner.append(verdict, warning, reasons);

  const SERIES = [
    ...LATENCIES.map(([metric, title]) => ({
      title: `${title}, ms`,
      metric: `${metric}_s`, scale: 1e3,
      lines: (p) => ["p50", "p99"].map((q) => [q, p[metric] && p[metric][q] !== null ? 1e3 * p[metric][q] : null]),
    })),
    {
      title: "Requests per second",
      metric: "goodput requests_per_s", scale: 1,
      lines: (p) => [["met every SLO", p.kept_per_s], ["ok", p.ok_per_s], ["failed", p.failed_per_s]],
    },
    { title: "Events with tokens per second", isSingle: true, metric: "output_tokens_per_s", scale: 1, lines: (p) => [["events", p.events_per_s]] },
    { title: "In flight", isSingle: true, lines: (p) => [["in flight", p.in_flight]] },
  ];
  for (const series of SERIES) series.names = series.lines({}).map(([name]) => name);
  let slosNow = [];
  let points = [], views = [], run = -1, theme = null, isLoading = null, isDrawing = false;

  const loadVega = () => {
    isLoading ??= new Promise((resolve, reject) => {
      document.head.append(
        element("script", { src: `${base}vega.js`, onload: resolve, onerror: reject }),
      );
    });
    return isLoading;
  };
  const rows = (series) => points.flatMap((p) =>
    series.lines(p).filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => ({ t: p.t_s, name, value })));
  // The limits of the SLOs about a chart's metric, as lines.
  const limits = (series) => slosNow.filter((slo) => (series.metric || "").split(" ").includes(slo.metric))
    .map((slo) => ({ limit: slo.limit * series.scale, label: `${slo.class ? `${slo.class}: ` : ""}${slo.text}` }));
  const COLORS = {
    "p50": "#1976d2", "p99": "#e65100", "met every SLO": "#2e7d32", "ok": "#81c784", "failed": "#c62828",
    "events": "#1976d2", "in flight": "#1976d2",
  };
  const lines = (series) => ({
    domain: series.names, range: series.names.map((name) => COLORS[name]),
  });
  const spec = (series) => ({
    title: { text: series.title, anchor: "start", fontSize: 13 },
    width: "container", height: "container", autosize: { type: "fit", contains: "padding", resize: true },
    layer: [
      {
        data: { name: "points", values: rows(series) },
        mark: { type: "line", point: { size: 12 }, clip: true },
        encoding: {
          x: { field: "t", type: "quantitative", title: "s", axis: { tickCount: 6 } },
          y: { field: "value", type: "quantitative", title: null, scale: { zero: true } },
          color: { field: "name", type: "nominal", title: null, scale: lines(series), legend: series.isSingle ? null : { orient: "top" } },
        },
      },
      ...(!limits(series).length ? [] : [{  // without a limit, its scale has no extent
        data: { name: "limits", values: limits(series) },
        mark: { type: "rule", strokeDash: [6, 4], color: isDark() ? "#ef9a9a" : "#b71c1c" },
        encoding: { y: { field: "limit", type: "quantitative" } },
      },
      {
        data: { name: "limits" },
        mark: { type: "text", align: "left", baseline: "bottom", dx: 4, dy: -2, color: isDark() ? "#ef9a9a" : "#b71c1c" },
        encoding: { y: { field: "limit", type: "quantitative" }, x: { value: 0 }, text: { field: "label" } },
      }]),
    ],
    background: "transparent",
    config: isDark()
      ? { axis: { labelColor: "#ddd", titleColor: "#ddd", gridColor: "#444" },
          title: { color: "#eee" }, legend: { labelColor: "#ddd" }, view: { stroke: "#555" } }
      : {},
  });
  const draw = async () => {
    if (!points.length || isDrawing) return;
    isDrawing = true;
    try {
      await drawAll();
    } finally {
      isDrawing = false;
    }
  };
  const drawAll = async () => {
    await loadVega();
    if (theme !== isDark()) {
      theme = isDark();
      panel.classList.toggle("dark", theme);
      clearCharts();
    }
    if (!charts.children.length) {
      charts.append(...SERIES.map((series) => element("div", { role: "img", ariaLabel: series.title })));
    }
    for (const [k, series] of SERIES.entries()) {  // the elements have their final width only now
      const values = rows(series);
      if (!values.length) continue;  // without values a chart has no scale
      if (views[k]) {
        const view = views[k].data("points", values);
        if (limits(series).length) view.data("limits", limits(series));
        await view.runAsync();
      } else {
        const embedded = await vegaEmbed(charts.children[k], spec(series), { actions: false, renderer: "svg" });
        views[k] = embedded.view;
      }
    }
  };
  const clearCharts = () => {
    views.forEach((view) => view.finalize());
    views = [];
    charts.replaceChildren();
  };

  const WORDS = { met: ["MET", "good"], missed: ["MISSED", "bad"], no_verdict: ["NO VERDICT", "open"] };
  const showVerdict = (live) => {
    const result = live.result, f = live.facts;
    const isDegraded = (f.shards || []).some((s) => s.state === "lost" || s.state === "died");
    verdict.replaceChildren();
    reasons.replaceChildren();
    warning.hidden = !f.warning || !!result;
    warning.textContent = f.warning ? `Warning: ${f.warning}` : "";
    const nMissed = slosNow.filter((slo) => slo.is_met === false).length;
    const isBad = result ? result.verdict !== "met" : nMissed || isDegraded || f.warning;
    banner.className = result && result.verdict === "no_verdict" && !isDegraded ? "open" : isBad ? "bad" : result || slosNow.some((slo) => slo.is_met) ? "good" : "";
    if (result && result.verdict) {
      const [word, kind] = WORDS[result.verdict] || [result.verdict, "bad"];
      verdict.append(element("span", { className: kind, textContent: word }), ` (exit code ${result.exit_code}) `);
    } else if (result) {
      verdict.append(element("span", { className: "bad", textContent: "NO RUN" }), ` (exit code ${result.exit_code}) `);
    } else if (live.state === "running" && f.is_over) {
      verdict.append("All requests have ended; computing the verdict … ");
    } else if (live.state === "running" && live.is_stopping) {
      verdict.append("Stopping: waiting for requests in flight … ");
    } else if (live.state === "running" && f.now_s !== undefined) {
      verdict.append(f.n_measured === null
        ? `Running: ${Math.min(f.now_s, f.horizon_s).toFixed(0)} of ${f.horizon_s.toFixed(0)} s `
        : `Running: ${Math.min(f.sums.measured, f.n_measured)} of ${f.n_measured} measured requests `);
      const nKnown = slosNow.filter((slo) => slo.is_met !== null).length;
      if (nKnown) verdict.append(element("span", {
        className: nMissed ? "bad" : "good",
        textContent: nMissed ? `· ${nMissed} of ${nKnown} SLOs missed so far ` : `· ${nKnown} of ${nKnown} SLOs met so far `,
      }));
    } else if (live.state === "running") {
      verdict.append("Checking the server and sending the schedule to the workers … ");
    } else {
      verdict.append("No run yet: choose a scenario and press Start. ");
    }
    if (isDegraded) {
      verdict.append(element("span", { className: "bad", textContent: "DEGRADED: a worker was lost, with its requests " }));
    }
    if (result && result.has_report) {
      verdict.append(element("a", { href: `${base}report`, textContent: "Report" }));
    }
    const lines = result ? [result.error, ...result.reasons] : live.notes;
    reasons.append(...lines.filter(Boolean).map((text) => element("li", { textContent: text })));
  };
  const showSlos = (live) => {
    const [head, ...lines] = live.result?.slo || [];
    slos.hidden = !lines.length && !slosNow.length;
    if (slos.hidden) return;
    if (!lines.length) return void showSlosSoFar();
    const cell = (tag, scope) => (text, k) => {
      const made = element(k ? tag : "th", { textContent: text });
      if (scope || !k) made.scope = scope || "row";
      return made;
    };
    slos.replaceChildren(
      element("caption", { textContent: "SLOs of the run and of its classes" }),
      element("thead", {}, element("tr", {}, ...head.map(cell("th", "col")))),
      element("tbody", {}, ...lines.map((cells) => element("tr", {}, ...cells.map(cell("td", ""))))),
    );
  };
  const showSlosSoFar = () => {
    const row = (slo) => {
      const kind = slo.is_met === null ? "" : slo.is_met ? "good" : "bad";
      const width = `${100 * Math.min(1, slo.share_of_limit ?? 0)}%`;
      const fill = element("i");
      fill.style.cssText = `width: ${width}; background: ${slo.is_met === false ? "#c62828" : "#2e7d32"}`;
      const name = element("th", { scope: "row", textContent: `${slo.class ? `${slo.class}: ` : ""}${slo.text}` });
      return element("tr", {},
        name,
        element("td", { className: kind, textContent: slo.is_met === null ? "in the report" : slo.is_met ? "ok" : "missed" }),
        element("td", { textContent: slo.shown }),
        element("td", { textContent: `${slo.operator === "<=" ? "≤" : "≥"} ${slo.limit_text}` }),
        element("td", {}, element("div", { className: "bar", title: "value as a share of the limit" }, fill)));
    };
    const head = ["SLO", "", "so far", "limit", "of the limit"].map((text) => {
      const cell = element(text ? "th" : "td", { textContent: text });
      if (text) cell.scope = "col";
      return cell;
    });
    slos.replaceChildren(
      element("caption", { textContent: "SLOs so far, warm-up included; failed requests count as infinitely slow" }),
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...slosNow.map(row)),
    );
  };
  const showFacts = (live) => {
    const f = live.facts;
    table.hidden = ledger.hidden = f.now_s === undefined;
    const about = live.asked ? `${live.asked.scenario} → ${live.asked.target}. ` : "";
    if (table.hidden) {
      facts.textContent = about;
      return;
    }
    const attainment = !f.has_limits ? "n/a: no per-request limit"
      : f.attainment === null ? "–" : `${(100 * f.attainment).toFixed(1)} % of the requests ended so far`;
    const rate = (value) => value === null ? "n/a" : `${number(value)}/s`;
    facts.textContent = `${about}Rate requested ${rate(f.requested_per_s)}, offered ${rate(f.asked_per_s)}, `
      + `achieved ${rate(f.achieved_per_s)}; `
      + `goodput ${number(f.goodput_per_s)}/s; attainment ${attainment}; in flight ${f.sums.in_flight}.`;
    const states = STATUSES.filter((s) => f.ledger[s] || s === "ok" || s === "lost");
    ledger.textContent = `${f.scheduled} scheduled = ${states.map((s) => `${f.ledger[s]} ${s.replace("_", " ")}`).join(" + ")}.`;
    const head = element("tr", {}, ...["", "n", "p50", "p90", "p99", "p99.9", "max"].map((text) => {
      const cell = element(text ? "th" : "td", { textContent: text });
      if (text) cell.scope = "col";
      return cell;
    }));
    table.replaceChildren(
      element("caption", { textContent: "All traffic so far, from the scheduled send time; the report adds confidence intervals" }),
      element("thead", {}, head),
      element("tbody", {}, ...LATENCIES.map(([metric, title]) => {
        const row = f.metrics[metric];
        return element("tr", {},
          element("th", { scope: "row", textContent: title }),
          element("td", { textContent: row.n }),
          ...QUANTILES.map((q) => element("td", { textContent: duration(row[q]) })));
      })),
    );
  };

  const poll = async () => {
    try {
      const response = await fetch(`${base}live.json?since=${points.length}`);
      if (response.ok && response.headers.get("content-type").includes("json")) {
        const live = await response.json();
        if (live.run !== run || live.n_points < points.length) {
          const isFirst = run < 0;
          run = live.run;
          points = [];
          clearCharts();
          if (!isFirst || live.points.length < live.n_points) return void setTimeout(poll, 0);
        }
        points.push(...live.points);
        slosNow = live.facts.slos || [];
        showVerdict(live);
        showSlos(live);
        showFacts(live);
        if (panel.isConnected && !panel.hidden) await draw();
      }
    } catch (error) {
      facts.textContent = `The server of this page does not answer: ${error.message}`;
    }
    setTimeout(poll, POLL_MS);
  };

  // The form hides slobench's fields behind a heading; open it once each time the form appears.
  const openParameters = () => {
    for (const heading of document.querySelectorAll(".MuiAccordionSummary-root")) {
      if (heading.textContent.trim() !== "Custom parameters" || heading.dataset.slo) continue;
      heading.dataset.slo = "opened";
      if (heading.getAttribute("aria-expanded") === "false") heading.click();
    }
  };

  // Target, scenario and SLO come first in the form; the number of users means nothing here.
  const orderForm = () => {
    const host = document.querySelector("form input[name=host]");
    const parameters = [...document.querySelectorAll(".MuiAccordionSummary-root")]
      .find((heading) => heading.textContent.trim() === "Custom parameters")?.closest(".MuiAccordion-root");
    if (!host || !parameters) return;
    let place = parameters.parentElement;
    while (place && !place.contains(host)) place = place.parentElement;
    const child = (inner) => [...place.children].find((one) => one.contains(inner));
    if (!place || place.dataset.slo || getComputedStyle(place).display !== "flex") return;
    place.dataset.slo = "ordered";
    child(host).style.order = "-2";
    child(parameters).style.order = "-1";
    const [scenario, slo] = ["scenario", "slo"].map((name) => parameters.querySelector(`[name=${name}]`));
    let fields = scenario;
    while (fields && !fields.contains(slo)) fields = fields.parentElement;
    for (const [k, field] of [scenario, slo].entries()) {  // Locust sorts the fields by name
      const box = fields && [...fields.children].find((one) => one.contains(field));
      if (box) box.style.order = String(k - 2);
    }
  };

  // After Start the run is of interest: open our tab once each time the tabs appear.
  const openTab = (tabs) => {
    if (tabs.dataset.slo) return;
    tabs.dataset.slo = "opened";
    if (new URLSearchParams(location.search).has("tab")) return;
    const ours = [...tabs.querySelectorAll("[role=tab]")].find((tab) => tab.textContent.trim() === "LLM SLO");
    if (ours) ours.click();
  };

  // On Locust's page the panel is a sibling of its tab's contents, because React redraws those.
  const mount = () => {
    openParameters();
    orderForm();
    const tabs = document.querySelector(".MuiTabs-root");
    if (tabs) openTab(tabs);
    const place = tabs && tabs.closest(".MuiContainer-root");
    if (place && panel.parentNode !== place) place.append(panel);
    const wasHidden = panel.hidden;
    panel.hidden = new URLSearchParams(location.search).get("tab") !== "slo";
    if (place && wasHidden && !panel.hidden) draw();
  };
  if (alone) {
    alone.append(element("h1", { textContent: "LLM SLO" }), panel);
  } else {
    mount();
    new MutationObserver(mount).observe(document.body, { childList: true, subtree: true });
    addEventListener("popstate", mount);
  }
  poll();
})();
