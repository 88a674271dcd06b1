// Helpers: elements, formatted numbers, and a request to the server with a deadline.

const DEADLINE_MS = 9000;

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Changes the element only if the text differs, so that a screen reader does not repeat it.
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export const count = (number) => Number(number).toLocaleString("en");
export const counted = (number, noun) => `${count(number)} ${noun}${Number(number) === 1 ? "" : "s"}`;
export const decimal = (number) => Number(number).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
export const rate = (perMinute) => (perMinute === undefined ? "" : ` ${count(Number(perMinute.toPrecision(3)))}/min`);
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "-");

export function seconds(value) {
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Number(value.toFixed(unit ? 1 : 0)) >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

// Throws an Error whose message is a sentence for the operator.
export async function ask(path, parameters = {}, headers = {}) {
  const query = new URLSearchParams(parameters);
  let response;
  try {
    response = await fetch(`blockyard/api/${path}?${query}`, { headers, signal: AbortSignal.timeout(DEADLINE_MS) });
  } catch (error) {
    throw new Error(error.name === "TimeoutError" ? "the dashboard did not answer in time" : "the dashboard cannot be reached");
  }
  if (response.status === 401 || response.status === 403)
    throw new Error("You are signed out: `blockyard open` prints or opens the URL that signs in");
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Error(`the dashboard answered with status ${response.status}`);
  }
  if (answer.error) throw new Error(answer.error);
  return answer;
}
