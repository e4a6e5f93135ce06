"use strict";
// The token comes with the link, behind its #, and stays in this tab: it is sent only with what is asked for.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname);
}

document.addEventListener("focusin", ({ target }) => {
  if (target.name === "token" && !target.value) target.value = sessionStorage.getItem("token") ?? "";
});

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.dataset.run) return;
  event.preventDefault();
  const action = event.submitter?.name;
  const output = form.querySelector("output");
  const token = form.elements.token.value || sessionStorage.getItem("token") || "";
  const steps = form.elements.number.valueAsNumber;
  const questions = { stop: "Save and stop? Start goes on from there.", steps: `Train to step ${steps} in all?` };
  if (action === "steps" && !Number.isInteger(steps)) {
    output.textContent = "Give the number of steps first.";
    return;
  }
  if (questions[action] && !confirm(questions[action])) return;
  for (const button of form.querySelectorAll("button")) button.disabled = true;
  output.textContent = "…";
  try {
    const response = await fetch(`/run/${encodeURIComponent(form.dataset.run)}/${action}`, {
      method: "POST",
      headers: { Authorization: `Bearer ${encodeURIComponent(token)}`, "Content-Type": "application/json" },
      body: JSON.stringify(action === "steps" ? { steps } : {}),
    });
    const answer = await response.json();
    if (response.ok) sessionStorage.setItem("token", token);
    output.textContent = answer.done ?? answer.refused;
  } catch {
    output.textContent = "The dashboard does not answer.";
  }
  for (const button of form.querySelectorAll("button")) button.disabled = false;
});
