for (const place of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(place.querySelector("script").textContent);
  const canvas = place.appendChild(document.createElement("div"));
  vegaEmbed(canvas, spec, { mode: "vega-lite", actions: false, renderer: "svg" }).catch((error) => {
    canvas.textContent = `This chart could not be drawn: ${error.message}`;
  });
}
