// Light and dark: the system's choice at first, the button's after. Paper is light. Who draws listens to "themechange".
{
  const root = document.documentElement;
  const show = (theme) => {
    root.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  let theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = theme;
  document.getElementById("theme").addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    show(theme);
  });
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", () => show(theme));
}
