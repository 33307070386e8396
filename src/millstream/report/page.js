"use strict";
// The page is complete without this. It adds values under the pointer, zoom, units, smoothing, scales, legends that
// hide and show, a table to download, and, on a page that is served, what is new.
(() => {
  const svg = "http://www.w3.org/2000/svg";
  const get = (id) => document.getElementById(id);
  const controls = { unit: get("unit"), scale: get("scale"), smooth: get("smooth") };
  // What the reader has chosen. Runs and curves are known by their names, which last when the data are newer.
  const view = { zoom: null, hidden: new Set(), off: new Set() };
  let runs = [], figures = [];

  const make = (parent, name, attributes, text = "") => {
    const element = document.createElementNS(svg, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return parent.appendChild(element);
  };
  const add = (parent, name, text = "") => {
    const element = parent.appendChild(document.createElement(name));
    element.textContent = text;
    return element;
  };
  const percent = (place) => (100 * place).toFixed(2) + "%";
  const within = (value, low, high) => Math.min(Math.max(value, low), high);

  // The place of the first of rising values that is no smaller.
  const search = (values, value) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  };

  // Where a run was, in another unit.
  const convert = (run, value, from, to) => {
    const { [from]: x, [to]: y } = run.moments;
    if (from === to || x === undefined || y === undefined) return value;
    const j = within(search(x, value), 1, x.length - 1), length = x[j] - x[j - 1];
    return length > 0 ? y[j - 1] + (y[j] - y[j - 1]) * (value - x[j - 1]) / length : y[j];
  };

  // Numbers and axes, as the page has them without a script.

  const number = (value) => {
    if (value === null) return "not finite";
    if (Math.abs(value) >= 1e12) return value.toExponential(3);
    return Math.abs(value) >= 1e3 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  };
  const duration = (seconds) => {
    if (seconds < 60) return `${+seconds.toPrecision(3)} s`;
    const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
    return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const sizes = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
  const times = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const bytes = (value) => {
    const [size, unit] = sizes.find(([size]) => value >= 0.9995 * size) ?? [1, "B"];
    return `${+(value / size).toPrecision(3)} ${unit}`;
  };
  const texts = {
    number,
    share: (value) => (value === null ? "not finite" : `${(100 * value).toFixed(1)} %`),
    bytes: (value) => (value === null ? "unknown" : bytes(value)),
  };
  const places = {
    step: (value) => `step ${Math.round(value).toLocaleString("en")}`,
    epoch: (value) => `epoch ${value.toFixed(2)}`,
    samples: (value) => `${Math.round(value).toLocaleString("en")} samples`,
    time: duration,
  };

  const count = (value) => {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= 10 * size || (Math.abs(value) >= size && value % (size / 10) === 0)) return +(value / size).toPrecision(4) + unit;
    }
    return String(+value.toPrecision(6));
  };
  const tick = (value, digits) => {
    if (Math.abs(value) >= 1e4) return Math.abs(value) < 1e13 ? count(value) : Number(value.toPrecision(3)).toExponential();
    return digits <= 5 ? value.toFixed(digits) : String(+value.toPrecision(3));
  };
  const round = (least) => {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 2, 5, 10].find((digit) => digit * power >= least * 0.999);
  };
  const multiples = (low, high, stride) => {
    const first = Math.ceil(low / stride), last = Math.floor(high / stride);
    return Array.from({ length: Math.max(last - first + 1, 0) }, (_, i) => (first + i) * stride || 0);
  };
  const digits = (stride) => Math.max(0, -Math.floor(Math.log10(stride) + 1e-9));

  const least = (values) => values.reduce((found, value) => Math.min(found, value), Infinity);
  const most = (values) => values.reduce((found, value) => Math.max(found, value), -Infinity);
  const linear = (values, floor, size = 1, unit = "") => {
    let [low, high] = values.length ? [least(values) / size, most(values) / size] : [0, 1];
    if (floor !== null) low = Math.min(floor, low);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    [low, high] = [low === floor ? low : low - room, high + room];
    const stride = round((high - low) / 6);
    const ticks = multiples(low, high, stride).map((value) => [value * size, `${tick(value, digits(stride))} ${unit}`.trim()]);
    return { low: low * size, high: high * size, ticks };
  };
  const logarithmic = (values) => {
    let low = Math.log10(least(values)), high = Math.log10(most(values));
    const room = (high - low) * 0.06 || 0.3;
    [low, high] = [low - room, high + room];
    const decades = high - low, parts = decades > 4 ? [1] : decades > 2 ? [1, 3] : [1, 2, 5];
    const stride = Math.max(1, Math.round(decades / 6)), ticks = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
      if (power % stride === 0) for (const part of parts) ticks.push(part * 10 ** power);
    }
    const inside = ticks.filter((value) => low <= Math.log10(value) && Math.log10(value) <= high);
    const isNear = ([value]) => 10 ** low <= value && value <= 10 ** high;
    const shown = inside.length > 1 ? inside.map((value) => [value, String(+value.toPrecision(6))]) : linear(values, null).ticks.filter(isNear);
    return { low: 10 ** low, high: 10 ** high, ticks: shown, log: true };
  };
  const across = (unit, low, high) => {
    if (unit === "time") {
      const [size, name] = times.find(([size]) => high - low >= 2 * size || size === 1), stride = round((high - low) / size / 6);
      return { low, high, ticks: multiples(low / size, high / size, stride).map((value) => [value * size, `${tick(value, digits(stride))} ${name}`]) };
    }
    const stride = unit === "epoch" ? round((high - low) / 6) : Math.max(round((high - low) / 6), 1);
    const ticks = multiples(low, high, stride).filter((value) => value >= 0);
    return { low, high, ticks: ticks.map((value) => [value, unit === "epoch" ? tick(value, digits(stride)) : count(value)]) };
  };
  const place = (axis, value) => {
    if (value === null || (axis.log && value <= 0)) return null;
    const scale = axis.log ? Math.log10 : (each) => each;
    return (scale(value) - scale(axis.low)) / (scale(axis.high) - scale(axis.low));
  };

  // What is shown of a chart: its curves, its range, its axes.

  const unitOf = (chart) => (chart.over === "time" ? "time" : controls.unit.value);
  const isShown = (chart, series) => !view.hidden.has(runs[series.run].name) && !view.off.has(chart.title + "\n" + series.label);
  const xOf = (chart, series) => {
    const unit = unitOf(chart), from = chart.over;
    series.places ??= { [from]: series.x };
    return (series.places[unit] ??= series.x.map((value) => convert(runs[series.run], value, from, unit)));
  };
  const extent = (chart) => {
    const shown = chart.series.filter((series) => isShown(chart, series) && series.x.length);
    const all = shown.map((series) => xOf(chart, series));
    let low = chart.over === "time" ? 0 : Math.min(...all.map((x) => x[0])), high = Math.max(...all.map((x) => x[x.length - 1]));
    if (!all.length) [low, high] = [0, 1];
    return low < high ? [low, high] : [low - 1, high + 1];
  };
  // A range in the unit of a chart: of several runs, as much as any of them did in that range.
  const rangeOf = (chart) => {
    if (view.zoom === null) return extent(chart);
    const { unit, low, high } = view.zoom, to = unitOf(chart);
    if (unit === to) return [low, high];
    const known = runs.filter((run) => !view.hidden.has(run.name) && run.moments[unit] && run.moments[to]);
    const range = [Math.min(...known.map((run) => convert(run, low, unit, to))), Math.max(...known.map((run) => convert(run, high, unit, to)))];
    return range[0] < range[1] ? range : extent(chart);
  };

  const settle = (chart) => {
    const [low, high] = rangeOf(chart), early = low + 0.1 * (high - low), all = [], late = [];
    for (const series of chart.series.filter((each) => isShown(chart, each))) {
      const x = xOf(chart, series), first = Math.max(search(x, low) - (chart.over === "time" ? 0 : view.zoom ? 1 : 0), 0);
      for (let i = first; i < x.length && (x[i] <= high || i === first || chart.over === "time" && x[i - 1] < high); i++) {
        for (const value of series.low === undefined ? [series.mean[i]] : [series.low[i], series.high[i]]) {
          if (value === null) continue;
          all.push(within(value, -1e270, 1e270));
          if (x[i] >= early) late.push(value);
        }
      }
    }
    const span = (values) => most(values) - least(values);
    const canLog = all.length > 0 && all.every((value) => value >= 1e-270 && value < 1e270), scale = controls.scale.value;
    chart.x = across(unitOf(chart), low, high);
    chart.cut = false;
    if (chart.kind === "share") {
      chart.y = { low: 0, high: 1, ticks: [0, 25, 50, 75, 100].map((each) => [each / 100, `${each} %`]) };
    } else if (chart.kind === "bytes") {
      const [size, unit] = sizes.find(([size]) => most(all) >= size || size === 1);
      chart.y = linear(all, 0, size, unit);
    } else if (canLog && (scale === "logarithmic" || (scale === "" && chart.log))) {
      chart.y = logarithmic(all);
    } else {
      chart.cut = scale === "" && view.zoom === null && chart.over === "step" && late.length > 1 && span(late) > 0 && span(late) * 3 < span(all);
      chart.y = linear(chart.cut ? late : all, chart.least);
    }
  };

  // Drawing.

  const path = (chart, x, values) => {
    let line = "", pen = "M";
    values.forEach((value, i) => {
      const height = place(chart.y, value);
      if (height === null) {
        pen = "M";
      } else {
        line += `${pen}${(1000 * within(place(chart.x, x[i]), -50, 50)).toFixed(1)},${(1000 * (1 - height)).toFixed(1)}`;
        pen = "L";
      }
    });
    return line;
  };
  // Of values over time, each holds from the end of the window before to that of its own.
  const stairs = (x) => x.flatMap((end, i) => [i ? x[i - 1] : 0, end]);
  const raw = (chart, series) => {
    const x = xOf(chart, series);
    if (chart.over === "time") return [stairs(x), series.mean.flatMap((value) => [value, value])];
    if (series.low === undefined) return [x, series.mean];
    return [x.flatMap((step) => [step, step]), series.low.flatMap((low, i) => [low, series.high[i]])];
  };
  // The mean of each value and its neighbours, those that there are.
  const smoothed = (values, share) => {
    const half = Math.max(Math.floor(values.length * share / 2), 1), sums = [0], counts = [0];
    values.forEach((value, i) => {
      sums.push(sums[i] + (value ?? 0));
      counts.push(counts[i] + (value === null ? 0 : 1));
    });
    return values.map((value, i) => {
      const low = Math.max(i - half, 0), high = Math.min(i + half + 1, values.length);
      return value === null ? null : (sums[high] - sums[low]) / (counts[high] - counts[low]);
    });
  };
  const colorOf = (chart, series) => (chart.stacked ? `u${series.color}` : `c${series.color % 10}`) + ` s${series.dash % 4}`;

  const drawAxes = (figure, chart) => {
    const left = figure.querySelector(".y-axis"), grid = figure.querySelector(".grid"), below = figure.querySelector(".x-axis");
    for (const each of [left, grid, below]) each.replaceChildren();
    for (const [value, text] of chart.y.ticks) {
      const height = 1 - place(chart.y, value);
      make(left, "text", { x: "100%", dx: "-6", y: percent(height), dy: ".32em" }, text);
      make(grid, "path", { d: `M0,${(1000 * height).toFixed(1)}H1000` });
    }
    for (const [value, text] of chart.x.ticks) {
      const at = place(chart.x, value), anchor = at < 0.04 ? "start" : at > 0.96 ? "end" : "middle";
      make(below, "text", { x: percent(at), y: "14", "text-anchor": anchor }, text);
    }
    make(below, "text", { class: "name", x: "50%", y: "29", "text-anchor": "middle" }, unitOf(chart));
  };
  const drawLines = (figure, chart, shown) => {
    const lines = figure.querySelector(".lines"), share = controls.smooth.value / 100;
    lines.replaceChildren();
    if (chart.stacked) {
      let floor = null;
      for (const series of shown) {
        const x = stairs(xOf(chart, series));
        floor ??= x.map(() => 0);
        const top = series.mean.flatMap((value) => [value, value]).map((value, i) => value + floor[i]);
        make(lines, "path", { class: `block ${colorOf(chart, series)}`, d: path(chart, [...x, ...[...x].reverse()], [...top, ...[...floor].reverse()]) + "Z" });
        floor = top;
      }
      return;
    }
    for (const series of shown) {
      const smooths = series.smooths && share > 0, color = colorOf(chart, series);
      make(lines, "path", { class: `raw ${color}${smooths ? "" : " wide"}`, d: path(chart, ...raw(chart, series)) });
      make(lines, "path", { class: `smooth ${color}`, d: smooths ? path(chart, xOf(chart, series), smoothed(series.mean, share)) : "" });
    }
  };
  const drawMarks = (figure, chart, shown) => {
    const marks = figure.querySelector(".marks"), isInside = (at) => at !== null && at >= -1e-9 && at <= 1 + 1e-9;
    marks.replaceChildren();
    for (const [step, text] of chart.epochs) {
      const at = place(chart.x, convert(runs[0], step, "step", unitOf(chart)));
      if (!isInside(at)) continue;
      make(marks, "line", { class: "epoch", x1: percent(at), x2: percent(at), y1: "0", y2: "100%" });
      make(marks, "text", { class: "epoch", x: percent(at), y: "-5", "text-anchor": at > 0.96 ? "end" : "middle" }, text);
    }
    const dot = (series, x, value, name, r) => {
      const at = place(chart.x, x), height = place(chart.y, value);
      if (isInside(at) && isInside(height)) make(marks, "circle", { class: `${name} ${colorOf(chart, series)}`, cx: percent(at), cy: percent(1 - height), r });
    };
    for (const series of shown) {
      const x = xOf(chart, series), inside = x.filter((each) => isInside(place(chart.x, each))).length;
      if (chart.over === "step" && series.low === undefined && inside <= 60) x.forEach((each, i) => dot(series, each, series.mean[i], "dot", 2.5));
      const unit = (step) => convert(runs[series.run], step, "step", unitOf(chart));
      if (series.best !== null) dot(series, unit(series.best[0]), series.best[1], "best", 5);
      for (const step of series.odd) {
        const at = place(chart.x, unit(step));
        if (isInside(at)) make(marks, "text", { class: `odd ${colorOf(chart, series)}`, x: percent(at), y: "99%", "text-anchor": "middle" }, "\u00d7");
      }
    }
  };
  const draw = ({ figure, chart }) => {
    const shown = chart.series.filter((series) => isShown(chart, series));
    settle(chart);
    drawAxes(figure, chart);
    drawLines(figure, chart, shown);
    drawMarks(figure, chart, shown);
    figure.querySelector(".cut").hidden = !chart.cut;
    figure.hidden = chart.single && view.hidden.has(runs[chart.series[0].run].name);
    if (chart.shown !== undefined) show(figure, chart, chart.shown);
  };
  const redraw = () => {
    controls.smooth.setAttribute("aria-valuetext", `${controls.smooth.value} % of the steps`);
    get("back").disabled = view.zoom === null;
    figures.forEach(draw);
  };

  // Values under the pointer.

  // The place of the point nearest to a value; of windows, of the first that ends after it.
  const nearest = (x, value, windows) => {
    const i = Math.min(search(x, value), x.length - 1);
    return !windows && i > 0 && value - x[i - 1] < x[i] - value ? i - 1 : i;
  };
  const clear = (figure, chart) => {
    for (const old of figure.querySelectorAll(".cursor, .point")) old.remove();
    figure.querySelector(".readout").replaceChildren();
    chart.shown = undefined;
  };
  const cells = (table, texts, color) => {
    const row = add(table, "tr");
    texts.forEach((text, i) => {
      const cell = add(row, "td");
      if (i === 0 && color) add(cell, "span").className = `swatch ${color}`;
      cell.append(text);
    });
  };
  const show = (figure, chart, value) => {
    clear(figure, chart);
    chart.shown = value;
    const marks = figure.querySelector(".marks"), place01 = place(chart.x, value), at = percent(place01);
    make(marks, "line", { class: "cursor", x1: at, x2: at, y1: "0", y2: "100%" });
    const shown = chart.series.filter((series) => isShown(chart, series) && series.x.length), found = new Map();
    for (const series of shown) {
      const x = xOf(chart, series), windows = chart.over === "time", i = nearest(x, value, windows), height = place(chart.y, series.mean[i]);
      const is = windows && (value > x[x.length - 1]) ? undefined : series.mean[i];
      found.set(series, is === undefined ? "" : texts[chart.kind](is));
      if (is !== undefined && height !== null && height >= 0 && height <= 1 && !chart.stacked) {
        make(marks, "circle", { class: `point ${colorOf(chart, series)}`, r: "4", cx: percent(place(chart.x, windows ? value : x[i])), cy: percent(1 - height) });
      }
    }
    const readout = figure.querySelector(".readout"), table = add(readout, "table"), labels = [...new Set(shown.map((series) => series.label))];
    const several = runs.length > 1 && !chart.single, header = add(add(table, "thead"), "tr"), body = add(table, "tbody");
    for (const text of [places[unitOf(chart)](value), ...(several ? labels : [""])]) add(header, "th", text);
    if (several) {
      runs.forEach((run, i) => {
        const own = shown.filter((series) => series.run === i);
        const values = labels.map((label) => found.get(own.find((series) => series.label === label)) ?? "");
        if (own.length) cells(body, [run.name, ...values], `c${i % 10} s0`);
      });
    } else {
      for (const series of shown) cells(body, [series.label, found.get(series)], colorOf(chart, series));
    }
    // To the right of the cursor, to its left, or where there is room for it: 50 dots are those of the axis.
    const room = readout.parentElement.clientWidth, x = place01 * room, width = readout.offsetWidth;
    readout.style.left = `${x + 12 + width <= room ? x + 12 : x - 12 - width >= -50 ? x - 12 - width : Math.max(room - width, -50)}px`;
  };
  // Of steps only those that have points, so that the cursor jumps from one to the next.
  const snapped = (chart, value) => {
    if (chart.over === "time") return value;
    const all = chart.series.filter((series) => isShown(chart, series) && series.x.length).map((series) => xOf(chart, series));
    const near = all.map((x) => x[nearest(x, value, false)]).filter((each) => each >= chart.x.low && each <= chart.x.high);
    return near.length ? near.reduce((best, each) => (Math.abs(each - value) < Math.abs(best - value) ? each : best)) : value;
  };

  // Zoom: by dragging, by keys, and back.

  const zoom = (chart, low, high) => {
    view.zoom = high > low ? { unit: unitOf(chart), low, high } : null;
    redraw();
  };
  const reset = () => {
    view.zoom = null;
    redraw();
  };
  const stretch = (chart, factor) => {
    const { low, high } = chart.x, middle = within(chart.shown ?? (low + high) / 2, low, high), [first, last] = extent(chart);
    const range = [middle - (middle - low) * factor, middle + (high - middle) * factor];
    if (range[0] <= first && range[1] >= last) reset(); else zoom(chart, Math.max(range[0], first), Math.min(range[1], last));
  };
  const listen = (each) => {
    const { figure } = each, area = figure.querySelector(".area");
    let start = null, band = null;
    const at = (event) => {
      const box = area.getBoundingClientRect();
      return within((event.clientX - box.left) / box.width, 0, 1);
    };
    const value = (where) => each.chart.x.low + where * (each.chart.x.high - each.chart.x.low);
    const ready = () => each.chart.x ?? settle(each.chart);
    const point = (event) => {
      ready();
      show(figure, each.chart, snapped(each.chart, value(at(event))));
      if (start === null || Math.abs(at(event) - start) * area.clientWidth < 5) return;
      band ??= make(figure.querySelector(".marks"), "rect", { class: "range", y: "0", height: "100%" });
      band.setAttribute("x", percent(Math.min(start, at(event))));
      band.setAttribute("width", percent(Math.abs(at(event) - start)));
    };
    const end = (event, isDone) => {
      const from = start, wasDrawn = band !== null;
      band?.remove();
      [start, band] = [null, null];
      if (isDone && wasDrawn) zoom(each.chart, value(Math.min(from, at(event))), value(Math.max(from, at(event))));
    };
    area.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = at(event);
      area.setPointerCapture(event.pointerId);
      point(event);
    });
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerup", (event) => end(event, true));
    area.addEventListener("pointercancel", (event) => end(event, false));
    area.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear(figure, each.chart));
    area.addEventListener("dblclick", reset);
    figure.addEventListener("blur", () => clear(figure, each.chart));
    figure.addEventListener("keydown", (event) => {
      if (event.target !== figure || event.ctrlKey || event.altKey || event.metaKey) return;
      const { chart } = each, move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const action = { "+": () => stretch(chart, 0.5), "=": () => stretch(chart, 0.5), "-": () => stretch(chart, 2), Escape: reset }[event.key];
      if (move === undefined && action === undefined) return;
      event.preventDefault();
      ready();
      if (action) return action();
      const all = chart.series.filter((series) => isShown(chart, series)).map((series) => xOf(chart, series));
      const longest = all.reduce((a, b) => (b.length > a.length ? b : a), []).filter((x) => x >= chart.x.low && x <= chart.x.high);
      if (!longest.length) return;
      const now = chart.shown === undefined ? longest.length : nearest(longest, chart.shown, false);
      show(figure, chart, longest[within(now + move, 0, longest.length - 1)]);
    });
  };

  // Legends: what is in them can be pressed.

  const button = (item, set, key) => {
    const made = document.createElement("button");
    made.type = "button";
    made.append(...item.childNodes);
    made.setAttribute("aria-pressed", String(!set.has(key)));
    made.addEventListener("click", () => {
      if (!set.delete(key)) set.add(key);
      made.setAttribute("aria-pressed", String(!set.has(key)));
      redraw();
    });
    item.replaceChildren(made);
  };
  const labelsOf = (chart) => [...new Set(chart.series.map((series) => series.label))];
  const upgradeLegend = ({ figure, chart }) => {
    const labels = labelsOf(chart);
    if (!chart.stacked && labels.length > 1) [...figure.querySelectorAll(".legend li")].forEach((item, i) => button(item, view.off, chart.title + "\n" + labels[i]));
  };
  const upgradeRuns = () => [...get("runs").children].forEach((item, i) => button(item, view.hidden, runs[i].name));

  // Units that are known of all runs.
  const offerUnits = () => {
    const known = runs.filter((run) => run.moments.step);
    for (const option of controls.unit.options) {
      option.hidden = option.disabled = option.value !== "step" && !(known.length && known.every((run) => run.moments[option.value]));
    }
    if (controls.unit.selectedOptions[0].disabled) controls.unit.value = "step";
  };

  // All numbers of the page as a table. A cell that a spreadsheet would take for a formula is told to be a text.
  const table = () => {
    const quoted = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;
    const rows = ["run,chart,curve,step,epoch,samples,time,value,lowest,highest"];
    for (const { chart } of figures) {
      for (const series of chart.series) {
        const run = runs[series.run], names = [run.name, chart.title, series.label].map(quoted).join(",");
        series.x.forEach((x, i) => {
          const at = (unit) => (run.moments[unit] || unit === chart.over ? +convert(run, x, chart.over, unit).toPrecision(8) : "");
          const low = series.low === undefined ? series.mean[i] : series.low[i], high = series.high === undefined ? series.mean[i] : series.high[i];
          rows.push([names, at("step"), at("epoch"), at("samples"), at("time"), series.mean[i] ?? "", low ?? "", high ?? ""].join(","));
        });
      }
    }
    return rows.join("\r\n") + "\r\n";
  };
  const download = () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
    link.download = `${document.querySelector("h1").textContent.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 80)}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const read = (page) => {
    const data = JSON.parse(page.getElementById("data").textContent);
    runs = data.runs;
    return data.charts;
  };

  // A page that is served asks for a newer one. Figures that are there stay, with what they are doing.
  const update = (page) => {
    const charts = read(page), old = new Map(figures.map((each) => [each.chart.title, each]));
    const details = () => [...document.querySelectorAll("#tables details")], title = (each, i) => `${i} ${each.querySelector("h3").textContent}`;
    const opened = new Map(details().map((each, i) => [title(each, i), each.open])), areNew = get("runs").textContent !== page.getElementById("runs").textContent;
    for (const id of ["summary", "left-out", "tables", ...(areNew ? ["runs"] : [])]) get(id).replaceChildren(...page.getElementById(id).childNodes);
    details().forEach((each, i) => (each.open = opened.get(title(each, i)) ?? each.open));
    const grids = [...document.querySelectorAll(".charts")], fresh = [...page.querySelectorAll(".charts")];
    figures = [];
    fresh.forEach((grid, i) => {
      const children = [...grid.children].map((figure) => {
        const chart = charts[figure.dataset.chart], known = chart && old.get(chart.title);
        if (!known) {
          if (chart) figures.push(begin(figure, chart));
          return figure;
        }
        const isSame = labelsOf(chart).join("\n") === labelsOf(known.chart).join("\n"), items = figure.querySelectorAll(".legend li");
        chart.shown = known.chart.shown;
        known.chart = chart;
        for (const part of ["figcaption", ".notes", ...(isSame ? [] : [".legend"])]) known.figure.querySelector(part).replaceChildren(...figure.querySelector(part).childNodes);
        if (isSame) known.figure.querySelectorAll(".legend li").forEach((item, j) => (item.querySelector("button") ?? item).replaceChildren(...items[j].childNodes));
        else upgradeLegend(known);
        known.figure.className = figure.className;
        known.figure.dataset.chart = figure.dataset.chart;
        figures.push(known);
        return known.figure;
      });
      // What is in its place is not moved, so that it keeps the focus.
      children.forEach((child, j) => grids[i].children[j] !== child && grids[i].insertBefore(child, grids[i].children[j] ?? null));
      while (grids[i].children.length > children.length) grids[i].lastElementChild.remove();
    });
    document.title = page.title;
    document.querySelector("h1").textContent = page.querySelector("h1").textContent;
    if (areNew) upgradeRuns();
    offerUnits();
    redraw();
  };
  const follow = async (status) => {
    let tag = "";
    const wait = () => new Promise((done) => setTimeout(done, 2000));
    for (;;) {
      if (document.visibilityState === "visible") {
        try {
          const answer = await fetch(location.href, { cache: "no-store", headers: { "If-None-Match": tag } });
          if (answer.status === 200) {
            tag = answer.headers.get("ETag");
            update(new DOMParser().parseFromString(await answer.text(), "text/html"));
            status.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
          }
          status.classList.toggle("lost", !answer.ok && answer.status !== 304);
        } catch {
          status.classList.add("lost");
          status.textContent = "millstream watch has ended";
        }
      }
      await wait();
    }
  };

  const begin = (figure, chart) => {
    const each = { figure, chart };
    listen(each);
    upgradeLegend(each);
    return each;
  };
  const charts = read(document);
  figures = [...document.querySelectorAll("[data-chart]")].map((figure) => begin(figure, charts[figure.dataset.chart]));
  upgradeRuns();
  offerUnits();
  for (const control of Object.values(controls)) control.addEventListener("input", redraw);
  get("back").addEventListener("click", reset);
  get("csv").addEventListener("click", download);
  document.querySelector("form.controls").addEventListener("submit", (event) => event.preventDefault());
  for (const each of document.querySelectorAll(".controls, .hint")) each.hidden = false;
  if (!get("live").hidden) follow(get("live"));
})();
