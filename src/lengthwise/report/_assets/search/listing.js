"use strict";
// The table sorts by the clicked heading and filters rows by text.
(() => {
  function sort(table, column, button) {
    const head = button.closest("th"), rising = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const key = (row) => {
      const cell = row.cells[column], v = cell.dataset.v;
      return v === undefined ? cell.textContent : v === "" ? null : +v;
    };
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (rising ? 1 : -1) * order(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }
  function filter(input, table) {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      left += !row.hidden;
    }
    input.closest(".tools").querySelector(".count").textContent = `${left.toLocaleString("en")} configurations`;
  }
  for (const box of document.querySelectorAll("[data-plan]")) {
    const table = box.querySelector("table.listing"), input = box.querySelector("input.filter");
    if (!table) continue;
    table.querySelectorAll("th button").forEach((button, i) => button.addEventListener("click", () => sort(table, i, button)));
    input.addEventListener("input", () => filter(input, table));
  }
})();
