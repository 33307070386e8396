"use strict";
// The page is complete without this. It adds smoothing, scales, and values under the pointer.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const svg = "http://www.w3.org/2000/svg";

  const make = (parent, name, attributes, text = "") => {
    const element = document.createElementNS(svg, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return parent.appendChild(element);
  };
  const percent = (place) => (100 * place).toFixed(2) + "%";

  const across = (chart, step) => (step - chart.x.low) / (chart.x.high - chart.x.low);
  const up = (axis, value) => {
    if (value === null || (axis.log && value <= 0)) return null;
    const scale = axis.log ? Math.log10 : (number) => number;
    return (scale(value) - scale(axis.low)) / (scale(axis.high) - scale(axis.low));
  };

  const path = (chart, axis, steps, values) => {
    let line = "", pen = "M";
    values.forEach((value, i) => {
      const height = up(axis, value);
      if (height === null) {
        pen = "M";
      } else {
        line += `${pen}${(1000 * across(chart, steps[i])).toFixed(1)},${(1000 * (1 - height)).toFixed(1)}`;
        pen = "L";
      }
    });
    return line;
  };

  // Of values over time, each holds from the end of the window before to that of its own.
  const drawn = (chart, series) => {
    if (chart.over === "time") {
      const begins = [chart.x.low, ...series.x];
      return [series.x.flatMap((end, i) => [begins[i], end]), series.mean.flatMap((value) => [value, value])];
    }
    if (series.low === undefined) return [series.x, series.mean];
    return [series.x.flatMap((step) => [step, step]), series.low.flatMap((low, i) => [low, series.high[i]])];
  };

  // The mean of each value and its neighbours, those that there are.
  const smoothed = (values, share) => {
    const half = Math.max(Math.floor(values.length * share / 2), 1);
    return values.map((value, i) => {
      if (value === null) return null;
      const near = values.slice(Math.max(i - half, 0), i + half + 1).filter((each) => each !== null);
      return near.reduce((sum, each) => sum + each, 0) / near.length;
    });
  };

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

  const drawAxis = (figure, axis) => {
    const texts = figure.querySelector(".y-axis"), grid = figure.querySelector(".grid");
    texts.replaceChildren();
    grid.replaceChildren();
    for (const [value, text] of axis.ticks) {
      const height = 1 - up(axis, value);
      make(texts, "text", { x: "100%", dx: "-6", y: percent(height), dy: ".32em" }, text);
      make(grid, "path", { d: `M0,${(1000 * height).toFixed(1)}H1000` });
    }
  };

  const draw = (figure, chart, share, scale) => {
    if (chart.stacked) return;
    const axis = chart.axes.find((each) => scale === (each.log ? "logarithmic" : "linear")) ?? chart.axes[0];
    chart.axis = axis;
    drawAxis(figure, axis);
    const raw = figure.querySelectorAll(".raw"), smooth = figure.querySelectorAll(".smooth");
    chart.series.forEach((series, i) => {
      const smooths = series.smooths && share > 0;
      raw[i].setAttribute("d", path(chart, axis, ...drawn(chart, series)));
      raw[i].classList.toggle("wide", !smooths);
      smooth[i].setAttribute("d", smooths ? path(chart, axis, series.x, smoothed(series.mean, share)) : "");
    });
    for (const dot of figure.querySelectorAll("circle[data-value]")) {
      dot.setAttribute("cy", percent(1 - up(axis, Number(dot.dataset.value))));
    }
  };

  // The place of the point nearest to a step; of windows, of the first that ends after it.
  const nearest = (steps, step, windows) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return !windows && low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };

  const clear = (figure) => {
    for (const old of figure.querySelectorAll(".cursor, .point")) old.remove();
    figure.querySelector(".readout").textContent = "";
  };

  const show = (figure, chart, step) => {
    clear(figure);
    chart.shown = step;
    const marks = figure.querySelector(".marks"), at = percent(across(chart, step));
    make(marks, "line", { class: "cursor", x1: at, x2: at, y1: "0", y2: "100%" });
    const texts = chart.series.map((series, i) => {
      const j = nearest(series.x, step, chart.over === "time"), value = series.mean[j], height = up(chart.axis, value);
      if (height !== null && !chart.stacked) {
        const place = { cx: percent(across(chart, chart.over === "time" ? step : series.x[j])), cy: percent(1 - height) };
        make(marks, "circle", { class: `point c${i % 6}`, r: "4", ...place });
      }
      return `${series.label} ${chart.percent ? (100 * value).toFixed(1) + " %" : number(value)}`;
    });
    const where = chart.over === "step" ? `step ${Math.round(step).toLocaleString("en")}` : duration(step);
    figure.querySelector(".readout").textContent = [where, ...texts].join(" · ");
  };

  // Of steps only those that have points, so that the cursor jumps from one to the next.
  const snapped = (chart, step) => {
    if (chart.over === "time") return step;
    const near = chart.series.filter((series) => series.x.length).map((series) => series.x[nearest(series.x, step, false)]);
    return near.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), near[0]);
  };

  const listen = (figure, chart) => {
    chart.axis = chart.axes[0];
    const area = figure.querySelector(".area");
    const point = (event) => {
      const box = area.getBoundingClientRect();
      const place = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      show(figure, chart, snapped(chart, chart.x.low + place * (chart.x.high - chart.x.low)));
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear(figure));
    figure.addEventListener("blur", () => clear(figure));
    figure.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const longest = chart.series.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
      const now = chart.shown === undefined ? longest.length : nearest(longest, chart.shown, false);
      show(figure, chart, longest[Math.min(Math.max(now + move, 0), longest.length - 1)]);
    });
  };

  const figures = [...document.querySelectorAll("[data-chart]")].map((figure) => [figure, charts[figure.dataset.chart]]);
  const smooth = document.getElementById("smooth"), scale = document.getElementById("scale");
  const redraw = () => {
    smooth.setAttribute("aria-valuetext", `${smooth.value} % of the steps`);
    for (const [figure, chart] of figures) draw(figure, chart, smooth.value / 100, scale.value);
  };
  for (const [figure, chart] of figures) listen(figure, chart);
  for (const control of [smooth, scale]) control.addEventListener("input", redraw);
  document.querySelector(".controls").hidden = false;
})();
