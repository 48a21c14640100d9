// The upload of a trace, CSV or JSONL, whose columns are mapped if its format is unknown.
const NO_TRACE = { trace_file: null, trace_columns: [] };
trace = NO_TRACE;

function useTrace(fields) {
  trace = fields;
  $("settings").elements.workload.disabled = Boolean(trace.trace_file);
  $("trace-clear").hidden = $("trace-about").hidden = $("replay-label").hidden = !trace.trace_file;
  $("mapping").hidden = true;
}

// react() is called after the trace changed.
function attachTrace(react) {
  let original = null;
  const roles = [["arrival", "arrival"], ["prompt", "prompt-column"], ["output", "output-column"], ["unit", "unit"]];
  const traced = (found) => {
    useTrace({ trace_file: found.file, trace_columns: found.columns_by_name });
    const rate = found.rate === null ? "all at once" : `${three(found.rate)} requests/s`;
    $("trace-about").textContent = `${found.name}: ${found.requests.toLocaleString("en")} requests, ${rate}; mean prompt ${three(found.prompt)}, mean output ${three(found.output)} tokens.`;
    if (found.text !== null) fileLink($("trace-about"), found.name, URL.createObjectURL(new Blob([found.text])));
    $("replay-label").hidden = found.rate === null;
    $("replay").checked = found.rate !== null;
    if (found.rate !== null) set($("rate"), Number(found.rate.toPrecision(3)));
    label($("settings"));
    react();
  };
  const mapped = async ({ file }) => {
    const found = await ask("answers/plan/columns", { file });
    if (!found.columns) return traced(found);
    original = file;
    for (const [role, id] of roles) {
      $(id).replaceChildren();
      options($(id), role === "unit" ? found.units : found.columns);
      $(id).value = found.guesses[role] ?? found.unit;
    }
    $("mapping").hidden = false;
    $("arrival").focus();
  };
  $("trace-upload").addEventListener("change", () => uploaded($("trace-upload"), mapped));
  $("map").addEventListener("click", async () => {
    try {
      traced(await ask("answers/plan/trace", { file: original, ...Object.fromEntries(roles.map(([role, id]) => [role, $(id).value])) }));
      showError(null);
    } catch (error) {
      showError(error);
    }
  });
  $("trace-clear").addEventListener("click", () => {
    useTrace(NO_TRACE);
    react();
  });
}
