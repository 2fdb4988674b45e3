"""The page's template."""

from __future__ import annotations

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<title>{{ report.shape.name }} on {{ report.cluster.name }} · fivefold</title>
<style>{{ style }}
.scroll { overflow-x: auto; margin-top: 14px; }
.times th, .times td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.times th:first-child, .times td:first-child { text-align: left; }
svg.bars { width: 100%; height: auto; }
svg.bars text { font-size: 13px; fill: currentColor; }
ol.lines li { margin: 6px 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
<header>
  <p class="eyebrow">fivefold plan serve</p>
  <h1>{{ report.shape.name }} on {{ report.cluster.name }}</h1>
  <p class="note">engine {{ report.engine.layout }}, weights {{ report.engine.weights }}, keys and
  values {{ report.engine.kv }}, as {{ report.engine.system.name }} runs it</p>
</header>
{% macro figures(charts) %}
<section class="charts" aria-label="Curves">
{% for chart in charts %}  <figure data-chart="{{ chart.index }}">
    <figcaption><span class="title">{{ chart.drawn.title }}{% if chart.drawn.logarithmic %} <small>log</small>{% endif %}</span>
      <span class="legend">{% if chart.drawn.lines|length > 1 %}{% for line in chart.drawn.lines %}<span class="key {{ line.style }}">{{ line.label }}</span>{% endfor %}{% endif %}</span></figcaption>
    <div class="plot">{{ chart.svg }}<div class="tip" hidden></div></div>
  </figure>
{% endfor %}</section>
{% endmacro %}
{% if options %}<section><h2>Deployments, fewest devices first</h2>
<div class="scroll"><table class="times" id="options">
<tr><th>deployment</th><th>devices</th><th>TTFT p95</th><th>TPOT p95</th><th>within limits</th><th>requests/s at most</th><th>$ per million tokens</th></tr>
{% for cells in options %}<tr>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div></section>{% endif %}
{% if tiles %}<section><h2>Simulated: {{ traffic }}</h2>
<div class="tiles" role="group" aria-label="Summary">
{% for what, value, remark in tiles %}  <div class="tile"><div class="what">{{ what }}</div><div class="value">{{ value }}</div><div class="remark">{{ remark }}</div></div>
{% endfor %}</div>
{{ figures(simulated) }}</section>{% endif %}
<section class="charts" aria-label="Engine">
  <figure><figcaption><span class="title">Memory of a device</span></figcaption><div class="plot">{{ memory }}</div></figure>
  <figure><figcaption><span class="title">A step of {{ report.batch }} answers</span></figcaption><div class="plot">{{ step }}</div></figure>
</section>
<section><h2>By answers at once</h2>
{{ figures(by_batch) }}</section>
<section><h2>The arithmetic</h2>
<ol class="lines">{% for line in report.lines %}<li>{{ line }}</li>
{% endfor %}</ol></section>
<footer>Predictions of this kind were off by {{ "%.0f"|format(band.tpot * 100) }}% (TPOT) and
{{ "%.0f"|format(band.ttft * 100) }}% (TTFT) on average where published measurements exist.</footer>
</main>
<script type="application/json" id="data">{{ data|tojson }}</script>
<script>{{ script }}</script>
</body>
</html>
"""
