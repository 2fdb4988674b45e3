"""The page's template and what its style has beside the reports' own."""

from __future__ import annotations

STYLE = """
.wide { grid-column: 1 / -1; }
.limit-line { stroke: var(--bad); stroke-width: 1.4; stroke-dasharray: 4 3; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.legend .key::before { display: none; }
.scroll { overflow-x: auto; background: #fff; border-radius: 6px; }
.scroll svg { width: auto; max-width: none; } .scroll svg text { fill: #222; font-size: 11px; }
.domain { fill: none; stroke: var(--base); } .device { fill: var(--grid); stroke: var(--base); }
svg .rank { font-size: 9px; text-anchor: middle; } .topology text { font-size: 11px; }
.topology { margin: 6px auto; }
.dot.held-out { fill: var(--held-out); } .dot { r: 4px; } .dot.mean { r: 6px; } .dot.faint { opacity: .45; }
.best { font: 14px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
td.code { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
thead th { color: var(--soft); font-weight: 600; }
ul.notes { padding-left: 20px; } ul.notes li { margin: 3px 0; overflow-wrap: anywhere; }
.over { overflow-x: auto; } figure .over { padding: 0 8px 6px; }
td.place { white-space: nowrap; overflow-wrap: normal; }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<title>{{ answer.job.shape.name }} on {{ answer.job.cluster.name }} · fivefold plan</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
  <p class="eyebrow">fivefold plan · {{ answer.job.training.global_batch }} sequences of {{ "{:,}".format(answer.job.training.sequence) }} tokens a step, {{ answer.job.training.compute }}, {{ answer.job.software.name }}</p>
  <h1>{{ answer.job.shape.name }} on {{ answer.job.cluster.name }}</h1>
  <p class="best" id="best">{{ best.replace(",", ", ") }}</p>
</header>
<section class="tiles" aria-label="Summary">
{% for what, value, remark in tiles %}  <div class="tile"><div class="what">{{ what }}</div><div class="value">{{ value }}</div><div class="remark">{{ remark }}</div></div>
{% endfor %}</section>
{% if notes %}<ul class="notes">
{% for note in notes %}<li>{{ note }}</li>
{% endfor %}</ul>{% endif %}
<section class="charts" aria-label="Pictures">
  <figure id="memory"><figcaption><span class="title">Memory of each pipeline stage's fullest moment</span>
    <span class="legend">{% for part in legend %}<span class="key"><span class="swatch" style="background:{{ part.colour }}"></span>{{ part.name }}</span>{% endfor %}</span></figcaption>
    {{ memory }}</figure>
  <figure id="waterfall"><figcaption><span class="title">Where a step's time goes</span></figcaption>{{ waterfall }}</figure>
{% if pipeline %}  <figure class="wide" id="pipeline"><figcaption><span class="title">Pipeline</span><span class="what">{{ pipeline_title }}</span></figcaption>
    <div class="scroll">{{ pipeline }}</div></figure>
{% endif %}  <figure class="wide" id="topology"><figcaption><span class="title">Axes on links: the groups of rank 0</span>
    <span class="legend">{% for axis in axes %}<span class="key"><span class="swatch" style="background:{{ axis.colour }}"></span>{{ axis.name }}</span>{% endfor %}</span></figcaption>
    {{ topology }}
    <div class="over"><table>
      <thead><tr><th>axis</th><th class="n">ranks</th><th>where</th><th>link</th><th class="n">reached</th><th class="n">waited for</th><th class="n">beside computation</th></tr></thead>
{% for axis in axes %}      <tr><td>{{ axis.name }}</td><td class="n">{{ axis.ways }}</td><td>{{ axis.where }}</td><td>{{ axis.link }}</td><td class="n">{{ axis.rate }}</td><td class="n">{{ axis.exposed }}</td><td class="n">{{ axis.hidden }}</td></tr>
{% endfor %}    </table></div></figure>
{% for chart in charts %}  <figure data-chart="{{ chart.index }}" class="pareto">
    <figcaption><span class="title">{{ chart.drawn.title }}</span>
      <span class="legend">{% for line in chart.drawn.lines %}<span class="key"><span class="swatch" style="background:var(--{{ 'held-out' if line.style == 'held-out' else 'mean' if line.style == 'mean' else 'line' }});{{ 'opacity:.45' if 'faint' in line.style else '' }}"></span>{{ line.label }}</span>{% endfor %}</span></figcaption>
    <div class="plot">{{ chart.svg }}<div class="tip" hidden></div></div>
  </figure>
{% endfor %}</section>
<h2>Ranking: the best of each shape</h2>
<div class="over"><table id="ranking">
  <thead><tr><th></th><th>strategy</th><th class="n">a step</th><th class="n">MFU</th><th class="n">memory</th><th>why not</th></tr></thead>
{% for place, text, seconds, mfu, size, why in ranking %}  <tr><td class="place">{{ place }}</td><td class="code">{{ text }}</td><td class="n">{{ seconds }}</td><td class="n">{{ mfu }}</td><td class="n">{{ size }}</td><td>{{ why }}</td></tr>
{% endfor %}</table></div>
{% for name, rows in compared %}<h2>Against {{ name }}</h2>
<div class="over"><table>
{% for piece, seconds, share, why in rows %}  <tr><td>{{ piece }}</td><td class="n">{{ seconds }}</td><td class="n">{{ share }}</td><td>{{ why }}</td></tr>
{% endfor %}</table></div>
{% endfor %}<details><summary><h2>Arithmetic</h2></summary>
<pre>{% for line in arithmetic %}{{ line }}
{% endfor %}</pre></details>
<footer>Searched {{ "{:,}".format(answer.counts.shapes) }} shapes; {{ "{:,}".format(answer.counts.judged) }} strategies were judged. Memory and time are predictions: see docs/plan.md for how they are made and how far off they have been.</footer>
</main>
<script type="application/json" id="data">{{ data|tojson }}</script>
<script>{{ script }}</script>
</body>
</html>
"""
