// Stored answers: the list, files of them, and two side by side. What a file has is checked, and shown as text only.
const form = $("settings"), FORMAT = "lengthwise.studies", MAX_FILE = 4e6;
const pages = new Map([...document.querySelectorAll(".pages li:not(.last) a")].map((one) => [one.textContent, one.getAttribute("href")]));
let studies = [], deleted = null;

// A copy of a stored answer with the known keys alone. Throws an Error for anything else.
function checked(study, at) {
  const wrong = (what) => new Error(`Answer ${at + 1} of the file ${what}.`);
  if (!study || typeof study !== "object") throw wrong("is no stored answer");
  const string = (from, name, most) => {
    if (typeof from[name] !== "string") throw wrong(`has no text "${name}"`);
    if (from[name].length > most) throw wrong(`has more than ${most} characters in "${name}"`);
    return from[name];
  };
  if (!study.fields || typeof study.fields !== "object" || Array.isArray(study.fields)) throw wrong('has no "fields"');
  if (JSON.stringify(study.fields).length > MAX_TEXT) throw wrong('has too long "fields"');
  if (!Array.isArray(study.cards) || study.cards.length > MAX_CARDS) throw wrong(`must have at most ${MAX_CARDS} "cards"`);
  if (!(study.time > 0 && study.time < 1e14)) throw wrong('has no "time"');
  return {
    id: string(study, "id", 64), page: string(study, "page", 40), name: string(study, "name", 120), time: study.time,
    fields: study.fields, command: string(study, "command", MAX_TEXT), scenario: string(study, "scenario", MAX_TEXT),
    cards: study.cards.map((card) => Object.fromEntries(["label", "value", "unit", "interval"].map((name) => [name, string(card ?? {}, name, 400)]))),
  };
}

const kept = () => stored().flatMap((study, at) => {
  try {
    return [checked(study, at)];
  } catch {
    return []; // another program's
  }
});

// Changes what is stored; the list is read again first, because another tab may have changed it.
function change(edit, redraw = draw) {
  try {
    store(edit(kept()));
    showError(null);
  } catch (error) {
    showError(error);
  }
  redraw();
}

function draw() {
  studies = kept().sort((a, b) => b.time - a.time);
  $("empty").hidden = studies.length > 0;
  $("export").disabled = !studies.length;
  $("undo").hidden = !deleted;
  $("list").replaceChildren(...studies.map((study) => {
    const name = element("input", { value: study.name, maxLength: 120, "aria-label": "Name" });
    name.addEventListener("change", () => change((all) => all.map((one) => (one.id === study.id ? { ...one, name: name.value } : one)), selects)); // the list stays, with its focus
    const remove = element("button", { type: "button", textContent: "Delete", "aria-label": `Delete ${study.name}` });
    remove.addEventListener("click", () => {
      deleted = study;
      change((all) => all.filter((one) => one.id !== study.id));
      $("undo").focus();
    });
    const at = pages.get(study.page);
    const open = at === undefined ? [] : [element("a", { href: `${at}#${encodeURIComponent(JSON.stringify(study.fields))}`, textContent: "Open", "aria-label": `Open ${study.name}` })];
    const numbers = study.cards.slice(0, 4).map((card) => `${card.label} ${shownCard(card)}`).join(" \u00b7 ");
    return element("li", {}, element("div", { className: "head" }, name, ...open, remove),
      element("p", { textContent: `${study.page}, ${new Date(study.time).toLocaleString()}` }), element("p", { textContent: numbers }), element("p", {}, element("code", { textContent: study.command })));
  }));
  selects();
}

function selects() {
  studies = kept().sort((a, b) => b.time - a.time);
  for (const [at, id] of [[0, "first"], [1, "second"]]) {
    const before = $(id).value;
    $(id).replaceChildren(...studies.map((one) => element("option", { value: one.id, textContent: one.name })));
    $(id).value = studies.some((one) => one.id === before) ? before : studies[Math.min(at, studies.length - 1)]?.id ?? "";
  }
  pair();
}

const shownCard = (card) => [card.value, card.unit, card.interval].filter(Boolean).join(" ");

async function pair() {
  const [a, b] = ["first", "second"].map((id) => studies.find((one) => one.id === $(id).value));
  $("pair").hidden = !a || !b || a === b;
  if ($("pair").hidden) return;
  const labels = [...new Set([...a.cards, ...b.cards].map((card) => card.label))];
  const of = (study, label) => study.cards.filter((card) => card.label === label).map(shownCard).join(", ") || "\u2013";
  table($("numbers"), ["number", a.name, b.name], [["command", a.command, b.command], ...labels.map((label) => [label, of(a, label), of(b, label)])]);
  try {
    const found = await ask("answers/studies/diff", { first: a.scenario, second: b.scenario });
    drawDifferences("differences", "same-count", found);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  }
}

function drawDifferences(place, count, found) {
  table($(place), ["key", "first", "second"], found.rows);
  $(place).parentNode.hidden = !found.rows.length;
  $(count).textContent = `${found.rows.length || "No"} ${found.rows.length === 1 ? "key differs" : "keys differ"}; ${found.same} ${found.same === 1 ? "is" : "are"} equal.`;
}

// Files of stored answers
async function imported(file) {
  if (file.size > MAX_FILE) throw new Error(`A file of stored answers has at most ${MAX_FILE / 1e6} MB.`);
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no JSON.`);
  }
  if (content?.format !== FORMAT || !Array.isArray(content.studies)) throw new Error(`${file.name} is no file of stored answers; choose one that "Export all" wrote.`);
  const found = content.studies.map(checked), known = new Set(kept().map(({ id, ...rest }) => JSON.stringify(rest)));
  const fresh = found.filter(({ id, ...rest }) => !known.has(JSON.stringify(rest))).map((one, at) => ({ ...one, id: `${TAB}${Date.now().toString(36)}-${at}` }));
  store([...kept(), ...fresh]);
  $("status").textContent = `${fresh.length} imported, ${found.length - fresh.length} already stored.`;
  draw();
}

// Two JSON answers of the command line
const sent = {};
async function compareFiles() {
  const fields = {};
  for (const side of ["first", "second"]) {
    const [file] = $(`${side}_file`).files;
    if (file && sent[side]?.file !== file) sent[side] = { file, id: (await upload(file)).file, fresh: true };
    fields[`${side}_file`] = file ? sent[side].id : null;
    fields[side] = sent[side]?.fresh ? "" : $(`${side}_name`).value;
  }
  const found = await ask("answers/studies/compare", fields);
  ["first", "second"].forEach((side, at) => {
    sent[side].fresh = false;
    $(`${side}_name`).replaceChildren();
    options($(`${side}_name`), found.names[at]);
    $(`${side}_name`).value = found.chosen[at];
    $(`${side}_names`).hidden = found.names[at].length < 2;
  });
  $("files").hidden = false;
  table($("errors"), ["metric", `first: ${found.chosen[0]}`, `second: ${found.chosen[1]}`, "error", "interval"], found.rows);
  drawDifferences("files-differences", "files-same", found.settings);
}

// Runs an action, and shows its error.
async function tried(action) {
  try {
    showError(null);
    await action();
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  tried(compareFiles).then(() => $("files").hidden || $("files").scrollIntoView());
});
for (const id of ["first", "second"]) $(id).addEventListener("change", pair);
for (const side of ["first", "second"]) $(`${side}_file`).addEventListener("change", () => ($(`${side}_names`).hidden = true));
$("import").addEventListener("change", async () => {
  const [file] = $("import").files;
  if (file) await tried(() => imported(file));
  $("import").value = ""; // the same file can be chosen again
});
$("export").addEventListener("click", () => save("studies.json", JSON.stringify({ format: FORMAT, version: 1, studies: kept() }, null, 1), "application/json"));
$("undo").addEventListener("click", () => {
  const back = deleted;
  deleted = null;
  change((all) => [...all, back]);
});
addEventListener("storage", draw); // of another tab
draw();
document.body.dataset.ready = 1;
