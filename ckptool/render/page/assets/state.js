/* What is looked at stands in the address, after the #: it can be linked to and gone back from. */

const state = {
  get: (key) => new URLSearchParams(location.hash.slice(1)).get(key) || "",

  /** The address with some of it changed; what is empty goes. */
  link(changes) {
    const all = new URLSearchParams(location.hash.slice(1));
    for (const [key, value] of Object.entries(changes)) {
      if (value) all.set(key, value);
      else all.delete(key);
    }
    return `#${all}`;
  },

  /** Change the address in place, as while typing: no step to go back to for each letter. */
  set(changes) {
    history.replaceState(null, "", state.link(changes));
    state.changed();
  },

  parts: [],

  /** Call `update` with the values of `keys` now, and whenever one of them changes. */
  follow(keys, update) {
    state.parts.push({ keys, update, seen: null });
    state.changed();
  },

  changed() {
    for (const part of state.parts) {
      const values = part.keys.map(state.get);
      const seen = JSON.stringify(values);
      if (seen === part.seen) continue;
      part.seen = seen;
      part.update(...values);
    }
  },
};

addEventListener("hashchange", state.changed);

/** A link into this page, made when it is used: the rest of the address may have changed. */
function leadTo(anchor, changes) {
  anchor.setAttribute("href", state.link(changes));
  anchor.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    location.hash = state.link(changes);
  });
  return anchor;
}
