/* A histogram comes as a word: one digit a bar, 0 to 63 of the fullest. */

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";

function histogram(word, width, height) {
  const levels = Array.from(word, (digit) => DIGITS.indexOf(digit));
  const step = width / levels.length;
  const bars = levels.map((level, i) => {
    const tall = level ? Math.max(1, (level / 63) * (height - 1)) : 0;
    return `M${(i * step).toFixed(2)} ${height}v${-tall.toFixed(2)}h${(step - 0.8).toFixed(2)}V${height}z`;
  });
  return shape(
    "svg",
    { class: "histogram", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    shape("path", { d: `M0 ${height - 0.5}H${width}`, class: "ground" }),
    shape("path", { d: bars.join("") }),
  );
}
