"use strict";

const form = document.querySelector("form");
const rows = [...document.querySelectorAll("tbody tr")];
const measured = rows.filter((row) => row.closest("#measurements"));
const figures = [...document.querySelectorAll("figure")];
const place = ({ dataset }) => `${dataset.platform} ${dataset.case}`;
const choices = ["architecture", "platform", "dtype", "check"];

for (const row of rows) row.haystack = `${row.dataset.architecture} ${row.textContent}`.toLowerCase();

function filtersFromHash() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = wanted.has(field.name);
    else if (field.name) field.value = wanted.get(field.name) ?? "";
    if (field.selectedIndex === -1) field.value = "";
  }
  filter();
}

function filtersToHash() {
  const set = [...new FormData(form)].filter(([, value]) => value);
  history.replaceState(null, "", set.length ? `#${new URLSearchParams(set)}` : location.pathname + location.search);
  filter();
}

function filter() {
  const wanted = Object.fromEntries(new FormData(form));
  const words = wanted.search.toLowerCase().split(/\s+/);
  for (const row of rows) {
    row.hidden = !(
      choices.every((name) => !wanted[name] || row.dataset[name] === wanted[name]) &&
      (!wanted.failures || row.dataset.verdict === "FAIL") &&
      words.every((word) => row.haystack.includes(word))
    );
  }
  const shown = measured.filter((row) => !row.hidden);
  const places = new Set(shown.map(place));
  for (const figure of figures) figure.hidden = !places.has(place(figure));
  document.querySelector("#count").value = `${shown.length} of ${measured.length} rows`;
}

const collator = new Intl.Collator("en", { numeric: true });

function compare(a, b, sign) {
  if (a.dataset.value === undefined) return sign * collator.compare(a.textContent, b.textContent);
  if (!a.dataset.value || !b.dataset.value) return !a.dataset.value - !b.dataset.value;
  const [x, y] = [Number(a.dataset.value), Number(b.dataset.value)];
  return x === y ? 0 : sign * (x < y ? -1 : 1);
}

function sort(header) {
  const ascending = header.ariaSort !== "ascending";
  for (const other of header.parentNode.cells) other.ariaSort = "none";
  header.ariaSort = ascending ? "ascending" : "descending";
  const body = header.closest("table").tBodies[0];
  const [column, sign] = [header.cellIndex, ascending ? 1 : -1];
  body.append(...[...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], sign)));
}

for (const header of document.querySelectorAll("thead th")) {
  const column = [...header.closest("table").tBodies[0].rows].map((row) => row.cells[header.cellIndex]);
  for (const cell of column) cell.dataset.label = header.textContent; // for the cards on a phone
  header.classList.toggle("number", Boolean(column[0]?.matches(".number")));
  const button = document.createElement("button");
  button.append(...header.childNodes);
  button.addEventListener("click", () => sort(header));
  header.append(button);
}

form.addEventListener("input", filtersToHash);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filtersToHash));
addEventListener("hashchange", filtersFromHash);
form.hidden = false;
filtersFromHash();
