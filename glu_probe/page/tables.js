(() => {
  "use strict";
  const missing = new Set(["", "–"]);
  const words = new Intl.Collator("en", { numeric: true });
  const infinite = { inf: Infinity, "-inf": -Infinity };
  const number = (text) => (text in infinite ? infinite[text] : Number(text.replaceAll(",", "")));

  // What is missing stays at the end, whichever way round.
  const order = (keys, descending) => {
    const known = keys.filter((key) => !missing.has(key));
    const numeric = known.every((key) => !Number.isNaN(number(key)));
    const compare = numeric ? (a, b) => number(a) - number(b) || 0 : words.compare;
    return keys.map((_, row) => row).sort((a, b) => {
      const gone = missing.has(keys[a]) - missing.has(keys[b]);
      if (gone || missing.has(keys[a])) return gone || a - b;
      return (descending ? compare(keys[b], keys[a]) : compare(keys[a], keys[b])) || a - b;
    });
  };

  const sort = (table, column) => {
    const headers = [...table.tHead.rows[0].cells];
    const descending = headers[column].getAttribute("aria-sort") === "ascending";
    const rows = [...table.tBodies[0].rows];
    const keys = rows.map((row) => row.cells[column].textContent.trim());
    table.tBodies[0].append(...order(keys, descending).map((row) => rows[row]));
    headers.forEach((header) => header.setAttribute("aria-sort", "none"));
    headers[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => sort(table, column));
    });
  }
  document.querySelectorAll(".hint").forEach((hint) => { hint.hidden = false; });
})();
