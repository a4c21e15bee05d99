"use strict";
(async () => {
  const read = (id) => document.getElementById(id).textContent;
  const note = (text) => {
    for (const plot of document.querySelectorAll(".plot")) {
      plot.textContent = text;
      plot.classList.add("note");
      plot.style.height = "auto";
    }
  };
  const plots = JSON.parse(read("figures"));
  if (Object.keys(plots).length === 0) return;
  if (!("DecompressionStream" in window)) {
    note("This browser is too old to draw the plot (it has no DecompressionStream). The tables show the figures.");
    return;
  }
  // The library is packed: unpacked it would make up nine tenths of the file.
  const packed = Uint8Array.from(atob(read("library")), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.nonce = read("nonce");
  script.textContent = await new Response(stream).text();
  document.head.appendChild(script);

  const narrow = window.matchMedia("(max-width: 700px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axisNames = (layout) => Object.keys(layout).filter((key) => /^[xy]axis/.test(key));

  const themed = (layout) => {
    const styled = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text"), size: narrow.matches ? 11 : 13 },
      margin: { l: narrow.matches ? 58 : 90, r: 12, t: 32, b: 44 },
      // On a phone a finger scrolls the page; with a mouse, dragging zooms in and a double click out again.
      dragmode: narrow.matches ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--text") },
      hoverlabel: { bgcolor: color("--card"), font: { color: color("--text") } },
    };
    for (const name of axisNames(layout)) {
      styled[name] = { ...layout[name], gridcolor: color("--line"), zerolinecolor: color("--line") };
      styled[name].automargin = true;
    }
    return styled;
  };
  const draw = () => Promise.all(Object.entries(plots).map(([name, figure]) => {
    const layout = themed({ ...figure.layout, height: figure.height, autosize: true });
    const options = {
      responsive: true, displaylogo: false, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
    };
    return Plotly.react(`plot-${name}`, figure.data, layout, options);
  }));
  await draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  document.documentElement.dataset.drawn = "true";
})();
