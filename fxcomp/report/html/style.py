"""Hold the style sheet and the script of a page: no network, no fonts but the reader's own.

The page is whole without its script, which zooms timelines and shows what lies under the pointer.
"""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2127; --dim: #5d6874; --rule: #d8dde3; --soft: #f4f6f8;
  --compute: #6b87b3; --compression: #d9822b; --packing: #a7b1bc; --exchanges: #8c6bb1; --wire: #2a9d8f;
  --wire-odd: #1d766b; --on-wire: #fff; --mark: #b3261e; --good: #1b7f3b; --dense: #8a6100;
  --one: #2a6fbb; --two: #d9822b; --three: #2a9d8f; --four: #8c6bb1; --five: #b3466b; --six: #77808a; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e3e7ec; --dim: #9aa6b2; --rule: #333b44;
  --soft: #1c2229; --compute: #6f8fc4; --packing: #5f6b78; --exchanges: #a487c9; --wire: #2fb3a3; --wire-odd: #1f8377;
  --on-wire: #06110f; --mark: #ff8a80; --good: #6fd08c; --dense: #e0b341; --one: #6fa8e8; --two: #e89a4a;
  --three: #3fbfae; --four: #b096d6; --five: #e07a9f; --six: #a0a9b3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 74rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .3rem 0; } h1.compress { color: var(--good); }
h1.dense { color: var(--dense); }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 60rem; } .dim, figcaption { color: var(--dim); } figcaption { font-size: .87rem; }
nav { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .8rem 0 1.4rem; font-size: .9rem; }
a { color: var(--one); text-decoration: none; } a:hover { text-decoration: underline; }
figure { margin: .8rem 0 1rem; } .wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .16rem .8rem .16rem 0; text-align: right; vertical-align: top; white-space: nowrap; }
th { color: var(--dim); font-weight: normal; border-bottom: 1px solid var(--rule); }
.text { text-align: left; white-space: normal; overflow-wrap: break-word; min-width: 6.6rem; }
.name { text-align: left; white-space: nowrap; color: var(--dim); padding-right: 1.2rem; }
tbody tr:hover { background: var(--soft); }
summary { cursor: pointer; color: var(--one); margin: .4rem 0; }
svg { display: block; overflow: visible; } svg text { fill: var(--ink); font-size: 12px; }
svg .dim, svg .tick { fill: var(--dim); } svg .grid { stroke: var(--rule); } svg .edge { stroke: var(--dim); }
.lanes { display: grid; grid-template-columns: max-content 1fr; column-gap: .7rem; }
.labels { font-size: 12px; line-height: 20px; } .labels div { white-space: nowrap; }
.labels .track { font-weight: 600; color: var(--ink); } .labels div { color: var(--dim); }
.labels .unit { text-align: right; }
.scroll { overflow-x: auto; overflow-y: hidden; } .scroll svg { width: 100%; overflow: hidden; }
.task { fill: currentColor; stroke: var(--page); stroke-width: .6px; } .task.thin { stroke: currentColor; }
.task:hover { opacity: .75; } .task.compute { color: var(--compute); } .task.compression { color: var(--compression); }
.task.packing { color: var(--packing); } .task.exchanges { color: var(--exchanges); }
.task.wire { color: var(--wire); } .task.wire.odd { color: var(--wire-odd); }
.lane { fill: var(--soft); } .critical { fill: var(--mark); }
.fine { display: none; } .zoomed .fine { display: inline; }
svg text.on { fill: var(--on-wire); font-size: 11px; text-anchor: middle; pointer-events: none; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: .87rem; color: var(--dim); margin: .3rem 0; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.tools { display: none; gap: .4rem; margin: .2rem 0; } .scripted .tools { display: flex; }
button { font: inherit; font-size: .85rem; padding: .05rem .6rem; border: 1px solid var(--rule); border-radius: 4px;
  background: var(--soft); color: var(--ink); cursor: pointer; }
#tip { position: fixed; display: none; z-index: 2; max-width: 26rem; padding: .4rem .6rem; border-radius: 4px;
  background: var(--ink); color: var(--page); font-size: .83rem; white-space: pre-line; pointer-events: none; }
.bar { fill: var(--one); } .bar.other { fill: var(--six); } .bar.measured { fill: var(--two); }
.bar.best { fill: var(--good); }
svg .haloed { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); column-gap: 1.6rem; }
.spot { fill: transparent; } .spot:hover { fill: var(--dim); fill-opacity: .15; }
@media (max-width: 44rem) { body { padding: 1rem .7rem 3rem; font-size: 14px; } .optional, .wide-only { display: none; }
  h1 { font-size: 1.4rem; } th, td { padding-right: .55rem; } }
@media print { :root { color-scheme: light; font-size: 11px; } body { max-width: none; padding: 0; font-size: 1rem; }
  nav, .tools, summary { display: none !important; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; }
  .scroll, .wide { overflow: visible; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { content-visibility: visible; display: block; height: auto; } }
"""

SCRIPT = """
(function () {
  "use strict";
  document.documentElement.classList.add("scripted");
  var tip = document.getElementById("tip");
  document.querySelectorAll("figure.timelines").forEach(function (figure) {
    var scrolls = figure.querySelectorAll(".scroll"), zoom = 1;
    function to(wanted, share, at) {
      zoom = Math.min(512, Math.max(1, wanted));
      figure.classList.toggle("zoomed", zoom >= 8);
      scrolls.forEach(function (scroll) {
        scroll.firstElementChild.style.width = 100 * zoom + "%";
        scroll.scrollLeft = share * scroll.firstElementChild.clientWidth - at;
      });
    }
    function around(factor) {
      var scroll = scrolls[0], at = scroll.clientWidth / 2;
      to(zoom * factor, (scroll.scrollLeft + at) / scroll.firstElementChild.clientWidth, at);
    }
    figure.querySelectorAll("button").forEach(function (button) {
      button.addEventListener("click", function () {
        if (button.dataset.zoom === "0") to(1, 0, 0); else around(Number(button.dataset.zoom));
      });
    });
    scrolls.forEach(function (scroll) {
      scroll.addEventListener("wheel", function (event) {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        var at = event.clientX - scroll.getBoundingClientRect().left;
        var share = (scroll.scrollLeft + at) / scroll.firstElementChild.clientWidth;
        to(zoom * Math.exp(-event.deltaY / 300), share, at);
      }, { passive: false });
    });
  });
  document.querySelectorAll("svg title").forEach(function (title) {
    var text = title.textContent, shape = title.parentElement;
    title.remove();
    shape.addEventListener("mousemove", function (event) {
      tip.textContent = text;
      tip.style.display = "block";
      var left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
      tip.style.left = Math.max(4, left) + "px";
      var below = event.clientY + 16;
      var fits = below + tip.offsetHeight < window.innerHeight;
      tip.style.top = (fits ? below : event.clientY - tip.offsetHeight - 10) + "px";
    });
    shape.addEventListener("mouseleave", function () { tip.style.display = "none"; });
  });
})();
"""
