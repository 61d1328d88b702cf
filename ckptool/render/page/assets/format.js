/* Numbers as people read them. */

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];
const SPECIAL = { inf: Infinity, "-inf": -Infinity, nan: NaN };

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  let unit = -1;
  do { bytes /= 1024; unit += 1; } while (bytes >= 999.95 && unit < UNITS.length - 1);
  return `${bytes.toFixed(1)} ${UNITS[unit]}`;
}

const count = (number) => number.toLocaleString("en");

const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Non-finite numbers arrive as words, for JSON has none. */
const numeric = (value) => (typeof value === "string" ? SPECIAL[value] : value);

function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  const magnitude = Math.abs(value);
  if (Number.isInteger(value) && magnitude < 1e7) return String(value);
  const plain = magnitude >= 1e-4 && magnitude < 1e7;
  return plain ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function percent(part, whole) {
  if (!whole || !part) return "0 %";
  const share = (100 * part) / whole;
  if (share < 0.01) return "< 0.01 %";
  return share > 99.99 && part < whole ? "> 99.99 %" : `${Number(share.toPrecision(3))} %`;
}

/** At most `most` characters, the middle left out: both ends of a name tell most. */
function shorten(text, most) {
  if (text.length <= most) return text;
  const tail = Math.ceil((most - 1) / 2);
  return `${text.slice(0, most - 1 - tail)}…${text.slice(text.length - tail)}`;
}
