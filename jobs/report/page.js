"use strict";
(() => {
  const cards = Array.from(document.querySelectorAll(".card"));
  const list = document.querySelector(".cards");
  const search = document.getElementById("search");
  const status = document.getElementById("status");
  const sort = document.getElementById("sort");
  const count = document.getElementById("count");
  const nothing = document.getElementById("nothing");
  const kinds = Array.from(document.querySelectorAll(".kind"));
  const viewer = document.getElementById("viewer");
  const root = document.documentElement;
  let kind = "";
  let open = null;

  // What is searched is what is shown, keys and all columns among it.
  const texts = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));
  const places = new Map(cards.map((card, place) => [card, place]));
  const visible = () => Array.from(list.children).filter((card) => !card.hidden);

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const card of cards) {
      const text = texts.get(card);
      const matches =
        (!status.value || card.dataset.status === status.value) &&
        (!kind || card.dataset.kinds.split("|").includes(kind)) &&
        words.every((word) => text.includes(word));
      card.hidden = !matches;
      shown += matches;
    }
    count.textContent = `${shown} of ${cards.length}`;
    nothing.hidden = shown > 0;
  }

  function order() {
    const name = sort.value.replace("-", "");
    const sign = sort.value.startsWith("-") ? -1 : 1;
    const number = (card) => (card.dataset[name] === "" ? Infinity : sign * Number(card.dataset[name]));
    const sorted = cards.slice().sort((a, b) => {
      let by = 0;
      if (name === "key") by = a.dataset.key.localeCompare(b.dataset.key, undefined, { numeric: true });
      else if (name) by = number(a) - number(b) || 0;
      return by || places.get(a) - places.get(b);
    });
    list.append(...sorted);
  }

  function show(card) {
    open = card;
    const picture = card.querySelector(".picture").cloneNode(true);
    viewer.querySelector(".viewer-picture").replaceChildren(...picture.childNodes);
    const caption = document.getElementById("viewer-caption");
    caption.replaceChildren();
    for (const one of card.querySelectorAll(".caption")) {
      const line = document.createElement("span");
      const name = one.parentElement.querySelector("b");
      line.textContent = (name ? `${name.textContent}  ` : "") + one.textContent;
      line.dir = "auto";
      line.style.display = "block";
      caption.append(line);
    }
    const facts = card.querySelector(".facts").cloneNode(true);
    facts.hidden = false;
    viewer.querySelector(".viewer-facts").replaceChildren(facts);
    const all = visible();
    viewer.querySelector(".viewer-place").textContent = `${all.indexOf(card) + 1} of ${all.length}`;
    if (!viewer.open) viewer.showModal();
    viewer.querySelector(".viewer-text").scrollTop = 0;
  }

  function neighbour(card, step) {
    const all = visible();
    return all[Math.min(all.length - 1, Math.max(0, all.indexOf(card) + step))];
  }

  function columns() {
    const all = visible();
    if (!all.length) return 1;
    const top = all[0].offsetTop;
    const below = all.findIndex((card) => card.offsetTop > top);
    return below < 0 ? all.length : below;
  }

  search.addEventListener("input", filter);
  status.addEventListener("change", filter);
  sort.addEventListener("change", order);
  for (const button of kinds) {
    button.addEventListener("click", () => {
      kind = button.dataset.kind;
      for (const one of kinds) one.setAttribute("aria-pressed", String(one === button));
      filter();
    });
  }
  list.addEventListener("click", (event) => {
    const card = event.target.closest(".card");
    if (card && !String(window.getSelection())) show(card);
  });
  viewer.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (event.target === viewer || (button && "close" in button.dataset)) viewer.close();
    else if (button) show(neighbour(open, Number(button.dataset.step)));
  });
  viewer.addEventListener("close", () => open && open.focus());

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (viewer.open) {
      if (event.key === "ArrowRight" || event.key === "ArrowDown") show(neighbour(open, 1));
      else if (event.key === "ArrowLeft" || event.key === "ArrowUp") show(neighbour(open, -1));
      else return;
      event.preventDefault();
      return;
    }
    if (event.key === "/" && !typing) {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (event.key === "Escape" && event.target === search) {
      search.value = "";
      filter();
      search.blur();
    } else if (!typing) {
      const card = event.target.closest(".card");
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
      if (card && event.key in steps) {
        event.preventDefault();
        neighbour(card, steps[event.key]).focus();
      } else if (card && (event.key === "Enter" || event.key === " ")) {
        event.preventDefault();
        show(card);
      }
    }
  });

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  filter();
})();
