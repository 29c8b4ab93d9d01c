// Parts of views. Texts of a job are put in as texts, never as HTML.

const SVG = document.getElementById("patterns").namespaceURI;

function fillIn(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
        if (value === undefined || value === null || value === false) continue;
        if (name === "style") for (const [key, set] of Object.entries(value)) node.style.setProperty(key, set);
        else if (name === "on") for (const [key, act] of Object.entries(value)) node.addEventListener(key, act);
        else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
        if (child !== null && child !== undefined && child !== false) node.append(child);
    }
    return node;
}
const el = (name, attributes, ...children) => fillIn(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => fillIn(document.createElementNS(SVG, name), attributes, children);

// A link to another state of this page; its key finds it again after a redraw.
function link(change, key, attributes, ...children) {
    return el("a", { href: hashWith(change), "data-key": key, ...attributes }, ...children);
}

function section(id, title, about, ...children) {
    return el("section", { id: "view-" + id, "aria-labelledby": "title-" + id },
        el("h2", { id: "title-" + id, tabindex: "-1" }, title),
        about && el("p", { class: "about" }, about),
        ...children);
}

// Columns that begin with > are of numbers.
function table(caption, head, rows, attributes) {
    const isNumber = head.map((name) => name.startsWith(">"));
    const cell = (at, value) =>
        value instanceof HTMLTableCellElement ? value
        : el(at === 0 ? "th" : "td", { scope: at === 0 && "row", class: isNumber[at] && "number" }, value);
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
        el("table", attributes,
            el("caption", {}, caption),
            el("thead", {}, el("tr", {}, head.map((name, at) =>
                el("th", { scope: "col", class: isNumber[at] && "number" }, name.replace(/^>/, ""))))),
            el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, at) => cell(at, value)))))));
}

// A number with a bar as long as its share.
function bar(value, most, text, kind) {
    const width = most > 0 ? Math.max(value > 0 ? 1 : 0, (100 * value) / most) : 0;
    return el("td", { class: "number bar" },
        el("span", { class: "bar-fill " + (kind ?? ""), style: { width: width + "%" }, "aria-hidden": "true" }),
        el("span", { class: "bar-text" }, text));
}

// Steps of a lane over a window of time. What is not nothing can be seen.
function steps(values, most, view, height) {
    const span = view.to - view.from;
    let path = "";
    for (let bin = 0; bin < values.length; bin += 1) {
        const begin = (bin * data.width_ns - view.from) / span;
        const end = begin + data.width_ns / span;
        if (end <= 0 || begin >= 1 || values[bin] <= 0) continue;
        const [left, right] = [Math.max(0, begin) * 1000, Math.min(1, end) * 1000];
        const high = Math.min(height, Math.max(height / 10, (height * values[bin]) / most));
        path += `M${left.toFixed(2)} ${height}V${(height - high).toFixed(2)}H${right.toFixed(2)}V${height}Z`;
    }
    return path;
}

function lane(label, kind, values, most, view, about) {
    const first = Math.floor(view.from / data.width_ns);
    const last = Math.min(Math.ceil(view.to / data.width_ns), values.length);
    const shown = values.slice(first, Math.max(last, first + 1));
    const highest = shown.length > 0 ? Math.max(...shown) : 0;
    const idle = shown.filter((value) => value <= 0).length;
    const said = `${label}, ${about}: at most ${digits(highest)} in the mean of a bin, nothing in ${idle} of ${shown.length} bins`;
    return svg("svg", { class: "lane " + kind, viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": said },
        svg("title", {}, said),
        svg("path", { d: steps(values, most, view, 20) }));
}

// Numbers for a time axis: about so many, at round values.
function ticks(view, about) {
    const span = (view.to - view.from) / 1e6;
    if (!(span > 0)) return [];
    const rough = span / about;
    const power = 10 ** Math.floor(Math.log10(rough));
    const by = [1, 2, 5, 10].map((times) => times * power).find((wide) => wide >= rough) ?? rough;
    const places = Math.max(0, -Math.floor(Math.log10(by) + 1e-9));
    const begin = view.from / 1e6;
    const all = [];
    for (let number = Math.ceil(begin / by); all.length <= 2 * about; number += 1) {
        const place = (number * by - begin) / span;
        if (place > 1) break;
        all.push({ place, text: (number * by).toFixed(places) });
    }
    return all;
}

function axis(view) {
    return el("div", { class: "axis", "aria-hidden": "true" },
        ticks(view, 8).map((tick) => el("span", { style: { left: 100 * tick.place + "%" } }, tick.text)),
        el("span", { class: "unit" }, "ms"));
}

// Lines tell paths apart without colours: dashes grow with their widths.
function dashes(path, wide) {
    const by = Math.max(wide, 2);
    return path === "relay" ? `${3 * by} ${2 * by}` : path === "host" ? `${by} ${by}` : null;
}

// Nodes on a circle with arcs between them: nodes are {key, name, middle}, arcs are {from, to, bytes, text, path}.
function graph(title, nodes, arcs) {
    const [width, height] = [560, nodes.length <= 2 ? 230 : 420];
    const place = new Map();
    const outer = nodes.filter((node) => !node.middle);
    const inner = nodes.filter((node) => node.middle);
    outer.forEach((node, at) => {
        const angle = Math.PI * (outer.length === 2 ? 1 : 1.5) + (2 * Math.PI * at) / Math.max(outer.length, 1);
        const alone = outer.length === 1;
        place.set(node.key, {
            x: width / 2 + (alone ? -150 : Math.cos(angle) * (width / 2 - 85)),
            y: height / 2 + (alone ? 0 : Math.sin(angle) * (height / 2 - 58)),
        });
    });
    inner.forEach((node, at) => {
        const side = outer.length === 2 ? { x: width / 2, y: height - 28 } : { x: width / 2, y: height / 2 };
        const apart = outer.length === 1 ? 150 : (at - (inner.length - 1) / 2) * 130;
        place.set(node.key, { x: side.x + apart, y: side.y });
    });
    const most = Math.max(1, ...arcs.map((arc) => arc.bytes));
    // Texts of thin arcs would hide each other.
    const named = new Set(arcs.filter((arc) => arc.bytes > most / 8).sort((one, other) => other.bytes - one.bytes).slice(0, 24));
    const [lines, texts] = [[], []];
    for (const arc of arcs) {
        const [from, to] = [place.get(arc.from), place.get(arc.to)];
        if (!from || !to) continue;
        const wide = 1.2 + (9 * arc.bytes) / most;
        const shape = arc.from === arc.to ? loop(from, width, height) : bow(from, to, wide, arc.bend ?? 0);
        lines.push(svg("g", { class: "arc " + (arc.path ?? "direct") },
            svg("title", {}, arc.title),
            svg("path", { class: "line", d: shape.line, "stroke-width": wide.toFixed(1), "stroke-dasharray": dashes(arc.path, wide) }),
            svg("path", { class: "head", d: shape.head })));
        if (named.has(arc)) texts.push(svg("text", { class: "arc-text", x: shape.x, y: shape.y }, arc.text));
    }
    const marks = nodes.map((node) => {
        const at = place.get(node.key);
        const half = Math.max(24, 4.2 * node.name.length + 8);
        return svg("g", { class: node.middle ? "node middle" : "node" },
            svg("title", {}, node.title ?? node.name),
            svg("rect", { x: at.x - half, y: at.y - 15, width: 2 * half, height: 30, rx: node.middle ? 3 : 15 }),
            svg("text", { x: at.x, y: at.y + 5 }, node.name));
    });
    return svg("svg", { class: "graph", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, lines, texts, marks);
}

// An arc that leaves room for the one back.
function bow(from, to, wide, bend) {
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const far = Math.hypot(dx, dy) || 1;
    const side = { x: -dy / far, y: dx / far };
    const out = far * (0.16 + 0.1 * bend);
    const middle = { x: (from.x + to.x) / 2 + side.x * out, y: (from.y + to.y) / 2 + side.y * out };
    const toward = (point, by) => {
        const long = Math.hypot(middle.x - point.x, middle.y - point.y) || 1;
        return { x: point.x + ((middle.x - point.x) / long) * by, y: point.y + ((middle.y - point.y) / long) * by };
    };
    const [begin, tip] = [toward(from, 26), toward(to, 32)];
    const long = 7 + wide;
    const end = toward(to, 32 + long);
    const across = { x: -(tip.y - end.y) / long, y: (tip.x - end.x) / long };
    const half = 3.5 + wide / 2;
    return {
        line: `M${begin.x.toFixed(1)} ${begin.y.toFixed(1)}Q${middle.x.toFixed(1)} ${middle.y.toFixed(1)} ${end.x.toFixed(1)} ${end.y.toFixed(1)}`,
        head: `M${tip.x.toFixed(1)} ${tip.y.toFixed(1)}L${(end.x + across.x * half).toFixed(1)} ${(end.y + across.y * half).toFixed(1)}` +
            `L${(end.x - across.x * half).toFixed(1)} ${(end.y - across.y * half).toFixed(1)}Z`,
        x: ((begin.x + end.x) / 4 + middle.x / 2).toFixed(1),
        y: ((begin.y + end.y) / 4 + middle.y / 2 + 4).toFixed(1),
    };
}

// From a node to itself, on its outer side.
function loop(at, width, height) {
    const [dx, dy] = [at.x - width / 2, at.y - height / 2];
    const far = Math.hypot(dx, dy) || 1;
    const out = { x: dx / far, y: far > 1 ? dy / far : 1 };
    const point = (away, aside) => `${(at.x + out.x * away - out.y * aside).toFixed(1)} ${(at.y + out.y * away + out.x * aside).toFixed(1)}`;
    return {
        line: `M${point(8, 14)}C${point(62, 30)} ${point(62, -30)} ${point(8, -14)}`,
        head: "",
        x: (at.x + out.x * 48).toFixed(1),
        y: (at.y + out.y * 48 + 4).toFixed(1),
    };
}
