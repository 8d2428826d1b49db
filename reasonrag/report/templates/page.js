// Shared by the pages behind a list: the link back to the list as it was, and functions that turn text into elements.
"use strict";

// Foreign text is only ever set as text content.
function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function folded(title, content) {
  const made = element("details");
  made.append(element("summary", title), element("pre", content));
  return made;
}

for (const link of document.querySelectorAll("nav a[href='../index.html']")) {
  try {
    link.hash = sessionStorage.getItem(link.pathname) ?? ""; // written by list.js
  } catch {
    // Some browsers store nothing for pages from disk: the link leads to the list from its start.
  }
}
