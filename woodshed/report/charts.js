// Day and night, and the curves: Plotly is unpacked only when a curve comes into view.
"use strict";

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
  (getComputedStyle(document.documentElement).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);

function darken(to = isDark() ? "light" : "dark") {
  document.documentElement.style.colorScheme = to;
  try { localStorage.setItem("woodshed-theme", to); } catch { /* a page from disk may have no storage */ }
  for (const node of document.querySelectorAll(".drawn")) draw(node);
}

const NIGHT = { "#0072b2": "#5db3ea", "#d55e00": "#f0975a", "#009e73": "#9efc79", "#2d2a6e": "#306ece", "#4b5402": "#676f1c", "#a773fb": "#fb66ae", "#0a1e04": "#f9dffe", "#9a2a76": "#ab419e" };

let plotly = null;

function loadPlotly() {
  plotly ??= inflate("plotly").then((bytes) => {
    const script = document.createElement("script");
    script.nonce = document.currentScript?.nonce || document.querySelector("script[nonce]").nonce;
    script.textContent = decode(bytes);
    document.head.append(script);
  });
  return plotly;
}

const figures = () => (figures.read ??= JSON.parse($("figures").textContent));

async function draw(node) {
  await loadPlotly();
  const { data, layout } = structuredClone(figures()[Number(node.dataset.figure)]);
  const style = getComputedStyle(document.body);
  const ink = style.color, line = style.borderTopColor;
  if (isDark())
    for (const trace of data) {
      if (trace.line?.color) trace.line.color = NIGHT[trace.line.color];
      if (trace.fillcolor) trace.fillcolor = NIGHT[trace.fillcolor];
    }
  const paper = style.backgroundColor;
  Object.assign(layout, {
    font: { family: style.fontFamily, size: 12, color: ink }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: paper, font: { color: ink } }, autosize: true,
  });
  for (const axis of ["xaxis", "yaxis"]) Object.assign(layout[axis], { gridcolor: line, linecolor: line, zerolinecolor: line });
  await Plotly.react(node, data, layout, { displayModeBar: false, responsive: true, scrollZoom: false });
  node.classList.add("drawn");
}

function watchCharts() {
  if (!$("figures")) return;
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "300px" });
  for (const node of document.querySelectorAll(".chart")) watcher.observe(node);
}

try { const kept = localStorage.getItem("woodshed-theme"); if (kept) document.documentElement.style.colorScheme = kept; } catch { /* as above */ }
$("dark").addEventListener("click", () => darken());
start();
watchCharts();
