// How the page looks in a frame of Ray's dashboard: with the theme that is chosen there, and as much of it as is asked for.

// The token of a URL that signs in, opened by one who is signed in already.
if (location.hash) history.replaceState(null, "", location.pathname + location.search);

const asked = new URLSearchParams(location.search);
const theme = asked.get("theme");
if (theme === "dark" || theme === "light") {
  document.getElementById("dark").media = theme === "dark" ? "all" : "not all";
  document.querySelector('meta[name="color-scheme"]').content = theme;
}
document.body.classList.toggle("framed", window.top !== window);
if (asked.has("view")) document.body.dataset.view = asked.get("view");
