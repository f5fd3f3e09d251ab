// Wiring: charts, buttons, dark mode, print.
const touch = navigator.maxTouchPoints > 0 && matchMedia("(pointer: coarse), (hover: none), (max-width: 40rem)").matches;
document.documentElement.classList.toggle("by-touch", touch);
view.listeners.push(align); // before the charts, which draw what it finds
const charts = [];
const box = document.getElementById("timeline-chart");
const timeline = new Timeline(box, document.getElementById("timeline-detail"));
charts.push(timeline.canvas);
const memoryBox = document.getElementById("memory-chart");
if (memoryBox && DATA.memory.length > 0) charts.push(new Memory(memoryBox).canvas);

const buttons = {
  in: () => view.zoom(0.5),
  out: () => view.zoom(2),
  all: () => view.set(0, view.span),
  steady: () => view.set(...(DATA.steady || [0, view.span])),
};
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", buttons[button.dataset.zoom]);
  if (button.dataset.zoom === "steady" && !DATA.steady) button.hidden = true;
}
const aligning = document.getElementById("align");
aligning.hidden = !paired;
aligning.addEventListener("click", () => {
  alignment.on = !alignment.on;
  aligning.setAttribute("aria-pressed", String(alignment.on));
  view.set(view.from, view.to);
});
view.set(...DATA.opening);
const repaint = () => charts.forEach((chart) => chart.paint());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// Print in light colours, and with all details open.
const folded = [...document.querySelectorAll("details")];
let open = [];
addEventListener("beforeprint", () => {
  printing = true;
  document.documentElement.classList.add("printing");
  open = folded.map((each) => each.open);
  for (const each of folded) each.open = true;
  repaint();
});
addEventListener("afterprint", () => {
  printing = false;
  document.documentElement.classList.remove("printing");
  folded.forEach((each, number) => {
    each.open = open[number];
  });
  repaint();
});
