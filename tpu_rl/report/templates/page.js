(() => {
  const one = (query, of = document) => of.querySelector(query);
  const svg = (name, values, text) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const key in values) made.setAttribute(key, values[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  // Tables whose heads sort them.
  for (const head of document.querySelectorAll('.sortable th')) head.onclick = () => {
    const table = head.closest('table'), place = [...head.parentNode.children].indexOf(head);
    const rows = [...table.rows].slice(1), text = row => row.cells[place].textContent;
    const sign = head.dataset.sign = head.dataset.sign == '1' ? '-1' : '1';
    rows.sort((a, b) => {
      const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
      if (isNaN(x) != isNaN(y)) return isNaN(x) ? 1 : -1;
      return sign * (isNaN(x) ? text(a).localeCompare(text(b)) : x - y);
    });
    for (const row of rows) table.tBodies[0].append(row);
  };
  // Completions by text and reward.
  const search = one('#search');
  if (search) search.oninput = () => {
    const words = search.elements.text.value.toLowerCase().split(' ').filter(Boolean);
    const [low, high] = ['low', 'high'].map(name => parseFloat(search.elements[name].value));
    let count = 0;
    for (const item of document.querySelectorAll('#found li')) {
      const page = one(item.firstChild.getAttribute('href')).textContent;
      const text = (item.textContent + page).toLowerCase();
      const reward = parseFloat(item.dataset.reward);
      item.hidden = !words.every(word => text.includes(word)) ||
        !isNaN(low) && !(reward >= low) || !isNaN(high) && !(reward <= high);
      count += !item.hidden;
    }
    one('#count').textContent = count + ' completions';
  };
  const part = one('#explore');
  if (!part) return;
  const runs = JSON.parse(one('script', part).textContent), form = one('form', part).elements;
  const add = (select, value, text) => {
    const option = document.createElement('option');
    option.value = value; option.textContent = text; select.append(option);
  };
  const metrics = [...new Set(runs.flatMap(run => Object.keys(run.lines)))].sort();
  for (const name of metrics) add(form.y, name, name);
  const first = ['eval/accuracy', 'eval/reward', 'eval/loss', 'reward/mean'];
  form.y.value = first.find(name => metrics.includes(name)) || metrics[0];
  ['steps', 'minutes', 'tokens'].forEach((name, index) => add(form.x, index, name));
  if (runs.length > 1) {
    for (const name in runs[0].settings) add(form.x, 's' + name, 'setting ' + name);
    for (const name of metrics) add(form.x, 'm' + name, 'last ' + name);
    add(form.x, 'p', 'all settings that differ');
  }
  const at = (xs, ys, x) => {
    let i = xs.findIndex(value => value >= x);
    if (i < 0) return ys[ys.length - 1];
    if (!i) return ys[0];
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1] || 1);
  };
  // Parallel coordinates: an axis for each setting, and one for the last value of a metric.
  const ladder = (drawing, keys, metric) => {
    const shown = runs.filter(run => run.lines[metric]);
    const names = Object.keys(runs[0].settings).slice(0, 8);
    const rank = name => {
      const values = [...new Set(shown.map(run => run.settings[name]))];
      values.sort((a, b) => parseFloat(a) - parseFloat(b) || a.localeCompare(b));
      return values.map((text, i) => [text, values.length > 1 ? i / (values.length - 1) : .5]);
    };
    const axes = names.map(rank), ends = shown.map(run => run.lines[metric][1].at(-1));
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    const share = value => (value - low) / (high - low || 1);
    axes.push([[String(low), 0], [String(high), 1]]);
    const px = i => 60 + 660 * i / (axes.length - 1), py = part => 250 - 220 * part;
    axes.forEach((axis, i) => {
      drawing.append(svg('path', {class: 'grid', d: `M${px(i)} 30V250`}),
        svg('text', {x: px(i), y: i % 2 ? 290 : 276, 'text-anchor': 'middle'},
          names[i] || 'last ' + metric));
      for (const [text, part] of axis) drawing.append(
        svg('text', {x: px(i) + 4, y: py(part) + 4}, text.slice(0, 16)));
    });
    shown.forEach((run, number) => {
      const end = run.lines[metric][1].at(-1);
      const parts = names.map((name, i) => axes[i].find(row => row[0] == run.settings[name])[1]);
      const points = [...parts, share(end)].map((part, i) => px(i) + ' ' + py(part));
      drawing.append(svg('path', {class: 'line c' + number % 6, d: 'M' + points.join('L'),
        'stroke-opacity': .25 + .75 * share(end)}));
      drawing.lastChild.append(svg('title', {}, run.name + ': ' + end));
    });
    keys.textContent = 'A line is a run; the stronger, the higher its ' + metric + '. '
      + names.length + ' of ' + Object.keys(runs[0].settings).length + ' settings.';
  };
  const draw = () => {
    const over = form.x.value, isLine = '012'.includes(over), drawing = one('svg', part);
    const last = (run, name) => run.lines[name] ? run.lines[name][1].at(-1) : NaN;
    let lines = runs.filter(run => run.lines[form.y.value]).map(run => {
      const [steps, values] = run.lines[form.y.value];
      if (isLine) return {
        name: run.name, group: run.group, y: values,
        x: steps.map(step => over == '0' ? step : at(run.axes[0], run.axes[over], step))};
      const name = over.slice(1);
      const x = over[0] == 's' ? parseFloat(run.settings[name]) : last(run, name);
      return {name: run.name, group: run.group, x: [x], y: [values.at(-1)]};
    }).filter(line => line.x.every(isFinite));
    if (over == 'p') {
      drawing.replaceChildren();
      return ladder(drawing, one('.keys', part), form.y.value);
    }
    if (form.seeds && form.seeds.checked) {
      const groups = lines.reduce(
        (all, of) => all.set(of.group, [...(all.get(of.group) || []), of]), new Map());
      lines = [...groups.values()].map(of => {
        const end = Math.min(...of.map(line => line.x.at(-1)));
        const x = of[0].x.filter(value => value <= end);
        const all = x.map(value => of.map(line => at(line.x, line.y, value)));
        return {
          name: of.map(line => line.name).join(', '), x,
          y: all.map(values => values.reduce((a, b) => a + b) / values.length),
          low: all.map(values => Math.min(...values)),
          high: all.map(values => Math.max(...values))};
      });
    }
    const xs = lines.flatMap(line => line.x);
    const ys = lines.flatMap(line => [...line.y, ...(line.low || []), ...(line.high || [])]);
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const px = x => 60 + 720 * (x - x0) / (x1 - x0 || 1);
    const py = y => 270 - 250 * (y - y0) / (y1 - y0 || 1);
    const path = (x, y) => x.map((value, i) => px(value).toFixed(1) + ' ' + py(y[i]).toFixed(1));
    const keys = one('.keys', part);
    drawing.replaceChildren(); keys.replaceChildren();
    if (!lines.length) { keys.textContent = 'nothing to draw'; return; }
    const short = value => String(+value.toPrecision(4));
    for (const share of [0, .25, .5, .75, 1]) {
      const [x, y] = [x0 + share * (x1 - x0), y0 + share * (y1 - y0)];
      drawing.append(svg('path', {class: 'grid', d: `M60 ${py(y)}H780`}),
        svg('text', {x: 54, y: py(y) + 4, 'text-anchor': 'end'}, short(y)),
        svg('text', {x: px(x), y: 290, 'text-anchor': 'middle'}, short(x)));
    }
    lines.forEach((line, number) => {
      const color = 'c' + number % 6, points = path(line.x, line.y);
      if (line.low) drawing.append(svg('path', {class: 'band ' + color, d: 'M' + path(line.x,
        line.high).concat(path(line.x, line.low).reverse()).join('L') + 'Z'}));
      if (points.length > 1) drawing.append(svg('path', {class: 'line ' + color,
        d: 'M' + points.join('L')}));
      else drawing.append(svg('circle', {class: color, r: 4, cx: px(line.x[0]),
        cy: py(line.y[0])}));
      drawing.lastChild.append(svg('title', {}, line.name + ': ' + short(line.y.at(-1))));
      const key = document.createElement('span');
      key.className = 'key ' + color; key.textContent = line.name; keys.append(key);
    });
  };
  one('form', part).oninput = draw;
  draw();
})();
