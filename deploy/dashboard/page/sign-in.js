// Exchanges the token in the URL's fragment for a cookie that scripts cannot read. Clears the address bar first.

const trouble = document.getElementById("trouble");
const here = location.pathname + location.search;
const tokenOf = (text) => text.split("#token=").pop().trim();

// Navigates instead of reloading, because a reload after a link from another site would not send the cookie.
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
    else complain("This is not the token of this page. Run `blockyard open` again after each start of the cluster.");
  } catch {
    complain("The dashboard cannot be reached, or the token has invalid characters.");
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
// A link from another site comes without the cookie, even if there is one.
else if ((await fetch("blockyard/app.js")).ok) enter();
