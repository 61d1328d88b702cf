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
  const plain = magnitude >= 1e-3 && magnitude < 1e7;
  return plain ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function percent(part, whole) {
  if (!whole || !part) return "0 %";
  const share = (100 * part) / whole;
  if (share < 0.01) return "< 0.01 %";
  return share > 99.99 && part < whole ? "> 99.99 %" : `${Number(share.toPrecision(3))} %`;
}

const isNumber = (part) => /^\d+$/.test(part);

/** At most `most` characters: parts of a name before the layer go, the longest others lose their ends, the last one only if nothing else is left; numbers stay. */
function shorten(text, most) {
  if (text.length <= most) return text;
  const parts = text.length > 1000 ? [text] : text.split(/([./])/);
  const long = () => parts.reduce((sum, part) => sum + part.length, 0) - most;
  while (long() > 0 && parts.length > 3 && ![0, 2].includes(parts.findIndex(isNumber))) parts.splice(0, 3, `…${parts[2].replace("…", "")}`);
  while (long() > 0) {
    const lengths = parts.map((part) => (isNumber(part) ? 0 : part.length));
    const last = parts.length - 1;
    if (lengths.some((length, i) => i < last && length >= 4)) lengths[last] = 0;
    const longest = Math.max(...lengths);
    if (longest < 4) break;
    parts[lengths.indexOf(longest)] = `${parts[lengths.indexOf(longest)].slice(0, parts.length > 1 ? -2 : most - 1)}…`;
  }
  return long() > 0 ? `${parts.join("").slice(0, most - 1)}…` : parts.join("");
}

const pen = document.createElement("canvas").getContext("2d");

/** As much of a name as is `room` pixels wide in letters of so many pixels; a number whole or not at all. */
function fitted(text, room, letters) {
  pen.font = `${letters}px ${getComputedStyle(document.body).fontFamily}`;
  const start = text.length > 1000 ? shorten(text, 1000) : text;
  if (pen.measureText(start).width * 1.03 <= room) return start;
  for (let most = isNumber(text) ? 0 : Math.min(start.length - 1, Math.floor(room / 3)); most > 2; most -= 1) {
    const short = shorten(start, most);
    if (pen.measureText(short).width * 1.03 <= room) return short;
  }
  return "";
}
