// Exchanges the token in the URL's fragment for a cookie that scripts cannot read. The token leaves the address bar first.

const trouble = document.getElementById("trouble");
const here = location.pathname + location.search;
const tokenOf = (text) => text.split("#token=").pop().trim();

// A navigation of this page, not a reload: a reload after a link from elsewhere would not send the cookie.
const enter = () => location.replace(here);

function complain(sentence) {
  trouble.textContent = sentence;
  trouble.hidden = false;
}

async function signIn(token) {
  try {
    const headers = { Authorization: `Bearer ${token}` };
    const response = await fetch("blockyard/sign-in", { method: "POST", headers });
    if (response.ok) enter();
    else complain("This token is not the one of this page. After a new start of the cluster, run `blockyard open` again.");
  } catch {
    complain("The dashboard is not reached, or the token has characters that no token has.");
  }
}

document.getElementById("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(tokenOf(document.getElementById("token").value));
});
document.querySelector("#sign-in button").disabled = false;

const fragment = location.hash;
if (fragment) history.replaceState(null, "", here);
if (fragment.startsWith("#token=")) await signIn(tokenOf(fragment));
// A link from elsewhere comes without the cookie, although there may be one.
else if ((await fetch("blockyard/app.js")).ok) enter();
