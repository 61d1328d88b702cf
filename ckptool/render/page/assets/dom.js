/* Elements are made one by one and filled with text nodes: what a file calls itself stays text. */

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text, nothing is parsed. */
function make(tag, attributes, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for a shape of an inline drawing. */
function shape(tag, attributes, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

/** Draw again at another size, in a frame of its own: what is drawn may change the size once more. */
function whenResized(element, draw) {
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(element);
}

const hint = make("div", { id: "hint", role: "status", hidden: "" });

/** Show lines of text beside an element while the pointer or the focus is on it. */
function explain(element, lines) {
  const show = () => {
    hint.replaceChildren(...lines().map((line) => make("div", {}, line)));
    hint.hidden = false;
    const [here, own] = [element.getBoundingClientRect(), hint.getBoundingClientRect()];
    const below = here.top < own.height + 8;
    const left = Math.min(Math.max(4, here.left), innerWidth - own.width - 4);
    hint.style.left = `${Math.max(4, left)}px`;
    hint.style.top = `${below ? Math.min(here.bottom, innerHeight - own.height) + 4 : here.top - own.height - 4}px`;
  };
  const hide = () => { hint.hidden = true; };
  for (const event of ["pointerenter", "focus"]) element.addEventListener(event, show);
  for (const event of ["pointerleave", "blur", "click"]) element.addEventListener(event, hide);
}

/** One stop for the Tab key in a drawing of many links; the arrow keys go on from there. */
function rove(figure) {
  const links = [...figure.querySelectorAll("[aria-label]")];
  links.forEach((link, i) => {
    link.setAttribute("tabindex", i ? "-1" : "0");
    link.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: links.length - 1 }[event.key];
      if (links[to]) {
        event.preventDefault();
        links[to].focus();
      }
    });
  });
}
