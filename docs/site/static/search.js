// SPDX-License-Identifier: Apache-2.0
// Searches the sections of all pages for those that have every word. The index is loaded at the first use. A page opened with ?q=WORDS shows
// what it finds for them.
(() => {
  const box = document.getElementById("search"), list = document.getElementById("found"), root = box.closest("nav").dataset.root;
  let loading;
  const index = () => loading ??= new Promise(done => {
    const script = document.createElement("script");
    script.src = root + "search-index.js";
    script.onload = () => done(searchIndex);
    document.head.append(script);
  });
  // A word in the title or heading counts more than one in the text, and a page for users more than one for developers.
  const score = (words, {url, title, heading, text}) => words.reduce((sum, w) => {
    const hit = (s, points) => s.toLowerCase().includes(w) ? points : 0;
    const points = (hit(title, 4) + hit(heading, 6) + hit(text, 1)) / (url.startsWith("docs/dev/") ? 10 : 1);
    return points && sum >= 0 ? sum + points : -1;
  }, 0);
  const excerpt = (text, word) => {
    const at = Math.max(0, text.toLowerCase().indexOf(word) - 40);
    return (at ? "… " : "") + text.slice(at, at + 120) + (at + 120 < text.length ? " …" : "");
  };
  const show = async () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean), sections = await index();
    const found = words.length ? sections.map(s => [score(words, s), s]).filter(f => f[0] > 0).sort((a, b) => b[0] - a[0]).slice(0, 12) : [];
    list.replaceChildren(...found.map(([, {url, title, heading, text}]) => {
      const item = document.createElement("li"), link = document.createElement("a"), small = document.createElement("small");
      link.href = root + url;
      link.textContent = heading ? title + ": " + heading : title;
      small.textContent = excerpt(text, words[0]);
      item.append(link, small);
      return item;
    }));
    if (words.length && !found.length) list.textContent = "Nothing found";
  };
  box.hidden = false;
  box.addEventListener("input", show);
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) {
    box.value = asked;
    document.getElementById("menu").checked = true;
    show();
  }
})();
