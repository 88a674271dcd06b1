// The page in a frame of Ray's dashboard: takes that dashboard's theme, and shows only the view in the URL.

// Removes the token of a sign-in URL from the address bar, if the user is signed in already.
if (location.hash) history.replaceState(null, "", location.pathname + location.search);

const asked = new URLSearchParams(location.search);
const theme = asked.get("theme");
if (theme === "dark" || theme === "light") {
  document.getElementById("dark").media = theme === "dark" ? "all" : "not all";
  document.querySelector('meta[name="color-scheme"]').content = theme;
}
document.body.classList.toggle("framed", window.top !== window);
if (asked.has("view")) document.body.dataset.view = asked.get("view");
