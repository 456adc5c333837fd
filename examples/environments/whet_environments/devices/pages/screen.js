// SPDX-License-Identifier: Apache-2.0
// A screen of 720 x 1280 units: places, colours and numbers of 3 x 5 blocks as in layout.py and digits.py.
"use strict";

const BLOCKS = {
  0: "111101101101111", 1: "010110010010111", 2: "111001111100111", 3: "111001111001111", 4: "101101111001001",
  5: "111100111001111", 6: "111100111101111", 7: "111001001001001", 8: "111101111101111", 9: "111101111001111",
  "+": "000010111010000", "-": "000000111000000", "/": "001001010100100",
};
const INK = "rgb(30,30,30)", PAPER = "rgb(245,245,240)", WHITE = "rgb(255,255,255)", OFF = "rgb(200,200,200)";
const RED = "rgb(220,50,47)", YELLOW = "rgb(240,190,0)", GREEN = "rgb(40,160,70)";

const asked = new URLSearchParams(location.search);
const LANGUAGE = asked.get("lang") === "zh" ? "zh" : "en";
const ROUNDS = Math.max(1, Number.parseInt(asked.get("rounds") || "10", 10) || 10);

// A generator of numbers in [0, 1) that a seed decides (mulberry32).
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}
const random = generator(Number.parseInt(asked.get("seed") || "0", 10) || 0);
const integer = (least, most) => least + Math.floor(random() * (most - least + 1));

const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
svg.setAttribute("preserveAspectRatio", "none");
document.body.append(svg);

// The page begins below the bars of the phone, so that its units are shares of the whole screen.
function fit() {
  const top = 1280 * Math.max(0, 1 - innerHeight / Math.max(innerHeight, screen.height));
  svg.setAttribute("viewBox", `0 ${top} 720 ${1280 - top}`);
}
addEventListener("resize", fit);
fit();

function add(name, attributes, onTap) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (onTap) element.addEventListener("click", onTap);
  svg.append(element);
  return element;
}
function rectangle(left, top, right, bottom, fill, onTap) {
  return add("rect", { x: left, y: top, width: right - left, height: bottom - top, fill }, onTap);
}
function button(x, y, halfWidth, halfHeight, fill, onTap) {
  return rectangle(x - halfWidth, y - halfHeight, x + halfWidth, y + halfHeight, fill, onTap);
}
function write(x, y, text, fill = WHITE, size = 40) {
  add("text", { x, y, fill, "font-size": size, "text-anchor": "middle", "dominant-baseline": "central" }).textContent = text;
}
function number(text, left, top, height, fill) {
  const size = height / 5;
  [...String(text)].forEach((sign, place) => {
    [...BLOCKS[sign]].forEach((block, n) => {
      if (block !== "1") return;
      const x = left + (4 * place + (n % 3)) * size, y = top + Math.floor(n / 3) * size;
      add("rect", { x, y, width: size, height: size, fill, "pointer-events": "none" });
    });
  });
}
