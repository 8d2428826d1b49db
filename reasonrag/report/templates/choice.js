// The list of an evaluation's questions with the answers of two chosen attempts. Loaded after list.js.
"use strict";

const [left, right] = ["left", "right"].map((id) => document.getElementById(id));
const [ANSWER, EM, F1, SAME] = [0, 1, 2, 3]; // values of an attempt; a string instead is the cause of its failure
const ATTEMPTS = 5;

view = (row) => {
  const question = row.slice(0, ATTEMPTS);
  const attempts = row[ATTEMPTS];
  if (!left) {
    const [only] = attempts;
    const marks = failed(only) ? ["failed"] : [only[EM] === 1 ? "right" : "wrong"];
    return { cells: [...question, answer(only), value(only, EM), value(only, F1)], page: row[ATTEMPTS + 1], marks };
  }
  const [first, second] = [attempts[left.value], attempts[right.value]];
  const both = [ANSWER, EM, F1].flatMap((column) => [first, second].map((of) => (column === ANSWER ? answer(of) : value(of, column))));
  const apart = failed(first) || failed(second) ? null : second[F1] - first[F1];
  return {
    cells: [...question, ...both, apart],
    page: `${row[ATTEMPTS + 1]}#${left.value},${right.value}`,
    marks: marksOf(first, second),
  };
};

function marksOf(first, second) {
  if (failed(first) || failed(second)) return ["failed"];
  const marks = first[SAME] === second[SAME] ? [] : ["answer"];
  if (first[EM] !== second[EM]) marks.push("em", first[EM] < second[EM] ? "gained" : "lost");
  return marks;
}

function failed(attempt) {
  return typeof attempt === "string";
}

function answer(attempt) {
  return failed(attempt) ? `set aside: ${attempt}` : attempt[ANSWER];
}

function value(attempt, column) {
  return failed(attempt) ? null : attempt[column];
}

for (const select of [left, right]) select?.addEventListener("change", arrange);
