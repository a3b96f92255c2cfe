"""The look of the pages: one style sheet and one small script, both inside the page; light and dark."""

from __future__ import annotations

import html

_LIGHT = """
--bg:#f7f6f3;--card:#fff;--line:#e3e0d9;--grid:#ecebe6;--ink:#1f2328;--soft:#656d76;--accent:#a4501c;--good:#1a7f4b;
--bad:#b42318;--warn:#fff6e5;--code:#f3f1ec;--c0:#2563c9;--c1:#c2661b;--c2:#158a5a;--c3:#8b46b8;--c4:#c2314f;
--c5:#0e8a94;--c6:#7a6a17;--c7:#5a6472;--k1n:#fff4e2;--kn1:#e9f3fc;--knm:#f6eefb;--kx:#fdecec;
"""
_DARK = """
--bg:#14161a;--card:#1c1f25;--line:#31363f;--grid:#282c34;--ink:#e4e7eb;--soft:#9aa3ae;--accent:#e59a5f;--good:#56c991;
--bad:#ff8a7a;--warn:#33290f;--code:#22262d;--c0:#6ea2ff;--c1:#f0a05a;--c2:#4fcf98;--c3:#c58ef0;--c4:#ff7f98;
--c5:#4ccad4;--c6:#d8c25a;--c7:#a7b0bc;--k1n:#33290f;--kn1:#0f2836;--knm:#2b1a38;--kx:#3a1717;
"""

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
header{display:flex;justify-content:space-between;gap:16px;align-items:flex-start;margin-bottom:18px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 12px}
h2 small,figcaption small{color:var(--soft);font-weight:400;font-size:13px;margin-left:8px}
.mark{color:var(--accent);font-weight:600;letter-spacing:.08em;text-transform:uppercase;font-size:12px}
.flow-line{margin:2px 0 0;color:var(--soft)}.flow-line b{color:var(--ink);font-weight:600}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin:12px 0 0}
.chip{border:1px solid var(--line);background:var(--card);border-radius:999px;padding:2px 10px;font-size:13px;
color:var(--soft)}.chip b{color:var(--ink);font-weight:600}
button{border:1px solid var(--line);background:var(--card);color:var(--soft);border-radius:8px;padding:5px 11px;
font:inherit;font-size:13px;cursor:pointer;white-space:nowrap}button:hover{color:var(--ink)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:20px 0 0}
.card,.chart,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px}
.card{padding:14px 16px}.card h3{margin:0;font-size:13px;font-weight:500;color:var(--soft)}
.card p{margin:3px 0 0;font-size:25px;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.card p small{font-size:15px;font-weight:500;color:var(--soft)}
.card span{font-size:13px;color:var(--soft)}.good{color:var(--good)!important}.bad{color:var(--bad)!important}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:12px}.charts .wide{grid-column:1/-1}
.charts.small{grid-template-columns:repeat(3,minmax(0,1fr));margin-top:12px}
.chart{margin:0;padding:12px 14px 4px}figcaption{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;
font-size:14px;margin-bottom:2px}
.keys{display:flex;flex-wrap:wrap;gap:2px 12px;color:var(--soft);font-size:13px}
.key i{display:inline-block;width:16px;border-top:3px solid;margin-right:5px;vertical-align:middle}
.key.dashed i{border-top-style:dashed;border-top-width:2px}
.plot{position:relative}svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--grid)}.axis{stroke:var(--line)}.tick{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.faint{stroke-width:1;opacity:.28}.line.dashed{stroke-dasharray:6 5;stroke-width:1.6}
.dots circle{fill:currentColor;stroke:var(--card);stroke-width:1.5}
.cross{stroke:var(--soft);stroke-dasharray:2 3;visibility:hidden}
.tip{position:absolute;top:6px;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:5px 9px;font-size:12.5px;box-shadow:0 3px 14px rgba(0,0,0,.14);white-space:nowrap;z-index:2;
font-variant-numeric:tabular-nums}.tip b{display:block}.tip i{display:inline-block;width:9px;height:9px;
border-radius:50%;background:currentColor;margin-right:6px}.tip span{color:var(--ink)}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.c6{color:var(--c6)}.c7{color:var(--c7)}.key i{border-color:currentColor}
.panel{padding:6px 16px 10px;overflow:auto}.panel.tall{max-height:430px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:right;font-weight:500;color:var(--soft);padding:8px 10px 6px;border-bottom:1px solid var(--line);
position:sticky;top:0;background:var(--card)}td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--grid)}
tr:last-child td{border-bottom:0}th:first-child,td:first-child{padding-left:0}.text{text-align:left}
td.text{overflow-wrap:anywhere}td .sub{color:var(--soft)}.best{font-weight:700;color:var(--good)}
.note{background:var(--warn);border:1px solid var(--line);border-left:4px solid var(--accent);border-radius:8px;
padding:8px 14px;margin:14px 0 0}
.empty{color:var(--soft);margin:6px 0}
details{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:10px 16px;margin-top:12px}
summary{cursor:pointer;font-weight:600}details[open] summary{margin-bottom:10px}
pre{margin:0;padding:12px 14px;background:var(--code);border-radius:8px;overflow:auto;max-height:560px;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
.flow{display:flex;flex-wrap:wrap;gap:4px;padding:8px 0}
.chunk{border:1px solid var(--line);border-radius:6px;font:12.5px/1.35 ui-monospace,Menlo,monospace;overflow:hidden;
background:var(--card)}.chunk div{padding:2px 5px;white-space:pre;min-height:1.5em}
.chunk .t{border-top:1px dashed var(--line);color:var(--soft)}
.chunk i{font-style:normal;border-right:1px solid var(--soft);padding-right:2px;margin-right:2px}
.chunk i:last-child{border:0;margin:0;padding:0}.k-1n{background:var(--k1n);border-color:var(--c1)}
.k-n1{background:var(--kn1);border-color:var(--c0)}.k-nm{background:var(--knm);border-color:var(--c3)}
.inexact{background:var(--kx);border-color:var(--bad)}.role{opacity:.6}.br{flex-basis:100%;height:0}
footer{margin-top:36px;color:var(--soft);font-size:13px;border-top:1px solid var(--line);padding-top:12px}
@media(max-width:820px){.charts,.charts.small{grid-template-columns:minmax(0,1fr)}main{padding:18px 14px 40px}
.wide .plot{overflow-x:auto}.wide svg{min-width:760px}}
@media print{button{display:none}.chart,.card{break-inside:avoid}}
"""

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f":root[data-theme=light]{{color-scheme:light;{_LIGHT}}}:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}"
    f"{_RULES}"
)

# Text reaches the page only through textContent: names of runs and metrics are data.
SCRIPT = """
(function(){
var root=document.documentElement,button=document.querySelector('button.theme');
if(button)button.onclick=function(){
var dark=root.dataset.theme?root.dataset.theme=='dark':matchMedia('(prefers-color-scheme:dark)').matches;
root.dataset.theme=dark?'light':'dark'};
document.querySelectorAll('.chart').forEach(function(figure){
var data=JSON.parse(figure.querySelector('script').textContent),svg=figure.querySelector('svg');
var tip=figure.querySelector('.tip'),cross=figure.querySelector('.cross'),x=data.x;
function hide(){tip.hidden=true;cross.style.visibility='hidden'}
svg.addEventListener('pointerleave',hide);
svg.addEventListener('pointermove',function(event){
var box=svg.getBoundingClientRect(),at=(event.clientX-box.left)/box.width*x[4];
var want=x[0]+(at-x[2])/(x[3]-x[2])*(x[1]-x[0]),near=null,found=[];
data.series.forEach(function(s){
var best=s.points.reduce(function(a,b){return Math.abs(b[0]-want)<Math.abs(a[0]-want)?b:a});
found.push([s,best]);if(s.level)return;if(near===null||Math.abs(best[0]-want)<Math.abs(near-want))near=best[0]});
if(near===null)near=Math.round(want);
tip.replaceChildren();var head=document.createElement('b');head.textContent='step '+near.toLocaleString('en');
tip.append(head);
found.forEach(function(f){var row=document.createElement('div'),dot=document.createElement('i');
row.className='c'+f[0].colour;var text=document.createElement('span');
text.textContent=f[0].name+'  '+f[1][1]+(f[1][0]==near||f[0].level?'':'  (step '+f[1][0].toLocaleString('en')+')');
row.append(dot,text);tip.append(row)});
var place=x[1]==x[0]?(x[2]+x[3])/2:x[2]+(near-x[0])/(x[1]-x[0])*(x[3]-x[2]);
cross.setAttribute('x1',place);cross.setAttribute('x2',place);cross.style.visibility='visible';tip.hidden=false;
var left=place/x[4]*box.width+12;if(left+tip.offsetWidth>box.width)left-=tip.offsetWidth+24;
tip.style.left=Math.max(left,0)+'px'})})})();
"""


def document(title: str, body: str) -> str:
    """A whole page that needs and loads nothing else."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def table(columns: list[str], rows: list[list[str]], *, text_columns: int = 1) -> str:
    """An HTML table of ready cells (escape them); the first ``text_columns`` are set to the left."""

    def cell(tag: str, i: int, content: str) -> str:
        return f"<{tag}{' class=text' if i < text_columns else ''}>{content}</{tag}>"

    head = "".join(cell("th", i, html.escape(c)) for i, c in enumerate(columns))
    body = "".join(f"<tr>{''.join(cell('td', i, c) for i, c in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def card(title: str, value: str, below: str = "") -> str:
    """A headline figure; ``value`` and ``below`` are ready HTML."""
    return f'<div class="card"><h3>{html.escape(title)}</h3><p>{value}</p><span>{below}</span></div>'


def chip(label: str, value: object) -> str:
    """A small fact in the page's head."""
    return f'<span class="chip">{html.escape(label)} <b>{html.escape(str(value))}</b></span>'
