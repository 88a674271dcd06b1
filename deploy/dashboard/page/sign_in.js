// Signing in: the token of Ray's dashboard, from the address's fragment or typed in, becomes a cookie of Ray's own.

export class NotSignedIn extends Error {}

const byId = (id) => document.getElementById(id);

// Throws an Error whose message is a sentence for the operator.
async function signIn(token) {
  let response;
  try {
    response = await fetch("api/authenticate", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("the dashboard is not reached");
  }
  if (!response.ok) throw new Error("the dashboard does not know this token");
}

export function showSignIn(isNeeded) {
  if (byId("sign-in").hidden === isNeeded) byId("sign-in").hidden = !isNeeded;
}

// The fragment is taken out of the address at once: it would stay in the history.
async function signInByAddress() {
  if (!location.hash.startsWith("#token=")) return;
  const token = decodeURIComponent(location.hash.slice("#token=".length));
  history.replaceState(null, "", location.pathname + location.search);
  await trySigningIn(token);
}

async function trySigningIn(token) {
  try {
    await signIn(token);
    byId("sign-in-trouble").textContent = "";
    showSignIn(false);
  } catch (error) {
    byId("sign-in-trouble").textContent = error.message;
    showSignIn(true);
  }
}

// Resolves once the token of the address, if it has one, has been tried.
export async function startSigningIn() {
  byId("sign-in").addEventListener("submit", async (event) => {
    event.preventDefault();
    const token = byId("token").value.trim();
    byId("token").value = "";
    await trySigningIn(token);
  });
  window.addEventListener("hashchange", signInByAddress);
  await signInByAddress();
}
