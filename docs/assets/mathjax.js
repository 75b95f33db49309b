// Formulas between \( \) and \[ \], as pymdownx.arithmatex writes them.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true },
  svg: { scale: 0.92 },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
