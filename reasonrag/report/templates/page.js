// What the pages behind a list share: the link back to the list as it was, and how text becomes an element.
"use strict";

// Foreign text is only ever text content.
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
    link.hash = sessionStorage.getItem(link.pathname) ?? ""; // list.js has written it down
  } catch {
    // A browser that keeps nothing for pages from disk: the link leads to the whole list.
  }
}
