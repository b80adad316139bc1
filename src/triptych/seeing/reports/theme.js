// Light and dark: the system's choice at first, the button's after. Paper is light. Who draws listens to "themechange".
{
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  let theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  show(theme);
  document.addEventListener("click", (event) => {
    if (event.target.id === "theme") show((theme = theme === "dark" ? "light" : "dark"));
  });
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", () => show(theme));
}
