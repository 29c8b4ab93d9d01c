// The views. Each gets what passes the filter (look), and makes a section.

const LANES = 64;
const LINKS_SHOWN = 24;
const RANKS_SHOWN = 32;
const NODES_SHOWN = 24;
const LISTED = 100;

// What all views share.
function look() {
    const filter = applied();
    const pass = passes(messages, filter);
    return {
        filter,
        pass,
        copiesPass: passes(copies, filter),
        callsPass: callsPass(filter),
        by: state.by === "count" ? "count" : "bytes",
        single: singlePass(filter),
        total: sumBy(messages, pass, filter, () => 0).get(0) ?? NOTHING,
        pairs: sumBy(messages, pass, filter, (row) => messages.from[row] + " " + messages.to[row]),
    };
}

const ends = (name) => name.split(" ").map(Number);
const amount = (look, sum) => (look.by === "bytes" ? size(sum.bytes) : count(sum.count));

function tiles(look) {
    const { total, filter } = look;
    const span = Math.min((filter.last + 1) * data.width_ns, data.span_ns) - filter.first * data.width_ns;
    const longest = look.single[0];
    const tile = (name, value, note) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, note && el("small", {}, note)));
    return el("dl", { class: "tiles", "aria-label": "In short" },
        tile("messages", count(total.count), `${count(total.timed)} arrived`),
        tile("bytes", size(total.bytes), `${count(total.bytes)} B`),
        tile("time", time(span), data.bins === 1 ? "one bin" : `${filter.last - filter.first + 1} of ${data.bins} bins`),
        tile("together", rate(total.bytes, span), "bytes by time"),
        tile("a message, in the mean", total.timed > 0 ? time(Math.round(total.ns / total.timed)) : "–", "from offer to arrival"),
        tile("the longest", total.longest > 0 ? time(total.longest) : "–",
            longest && longest.took === total.longest && link({ message: longest.number, view: "message" }, "longest", {}, `message ${longest.number}`)));
}

function stands(look) {
    const advice = data.advice.map((one) => el("li", {}, el("strong", {}, one.what), el("p", {}, one.evidence), el("p", {}, "Try: ", one.try_this)));
    const fallbacks = Object.entries(data.fallbacks).map(([reason, [many, bytes]]) => [reason, count(many), size(bytes)]);
    return section("notes", "Advice and notes", null,
        advice.length > 0 ? el("ol", { class: "advice" }, advice) : el("p", {}, "There is no advice for this job."),
        data.notes.length > 0 ? el("ul", { class: "notes" }, data.notes.map((note) => el("li", {}, note))) : el("p", {}, "There are no notes: all that was recorded is here."),
        data.dropped > 0 && el("p", {}, `${count(data.dropped)} records were dropped.`),
        fallbacks.length > 0 && table("Sends of device buffers that the library did not carry, in the whole job", ["reason", ">messages", ">bytes"], fallbacks));
}

// Single messages as bars, in as few rows as they need, three at most.
function marks(list, view, key) {
    const free = [];
    const shown = [];
    const span = view.to - view.from;
    let left = 0;
    for (const message of list) {
        const end = message.begin + (message.took ?? 0);
        if (end < view.from || message.begin > view.to) continue;
        if (shown.length >= 40) {
            left += 1;
            continue;
        }
        shown.push({ message, begin: message.begin, end: Math.max(end, message.begin + span / 250) });
    }
    shown.sort((one, other) => one.begin - other.begin);
    const bars = [];
    for (const { message, begin, end } of shown) {
        let row = free.findIndex((until) => until <= begin);
        if (row < 0 && free.length < 3) row = free.push(0) - 1;
        if (row < 0) {
            left += 1;
            continue;
        }
        free[row] = end;
        const from = Math.max(0, (begin - view.from) / span);
        const to = Math.min(1, (end - view.from) / span);
        const name = `message ${message.number}, rank ${message.from ?? "?"} to ${message.to ?? "?"}, ${size(message.bytes)}, ${message.took === null ? "did not arrive" : time(message.took)}`;
        bars.push(link({ message: message.number, view: "message" }, `${key}-${message.number}`, {
            class: "mark", "aria-label": name, title: name,
            style: { left: 100 * from + "%", width: 100 * (to - from) + "%", top: row * 9 + "px" },
        }));
    }
    return el("div", { class: "marks", style: { height: Math.max(1, free.length) * 9 + "px" } }, bars,
        left > 0 && el("span", { class: "more" }, `+${left}`));
}

function timeline(look) {
    const view = look.filter.window;
    const busy = underWay(messages, look.pass, (row) => new Set([messages.from[row], messages.to[row]]));
    const inCalls = underWay(calls, look.callsPass, (row) => [calls.from[row]]);
    const isShown = (rank) => look.filter.rank === undefined || rank === look.filter.rank;
    const ranks = [...new Set([...busy.keys(), ...inCalls.keys()])].filter((rank) => rank !== UNKNOWN && isShown(rank)).sort((one, other) => one - other);
    const highest = (lanes) => Math.max(1e-9, ...[...lanes.values()].map((one) => Math.max(...one.mean)));
    const [mostCalls, mostBusy] = [Math.max(1, highest(inCalls)), highest(busy)];
    const none = new Float64Array(data.bins);
    const rows = ranks.slice(0, LANES).map((rank) => {
        const name = `rank ${rankName(rank)}`;
        const own = look.window.filter((message) => groupOf(message.from) === rank || groupOf(message.to) === rank);
        const host = step === 1 && data.ranks.find((one) => one.rank === rank)?.host;
        return el("div", { class: "row" },
            el("div", { class: "label" }, link({ rank: rank * step }, `lane-${rank}`, { title: "Only this rank" }, name), host && el("small", {}, host)),
            el("div", { class: "lanes" },
                lane(name, "calls", (inCalls.get(rank) ?? { mean: none }).mean, mostCalls, view, "MPI calls under way"),
                lane(name, "messages", (busy.get(rank) ?? { mean: none }).mean, mostBusy, view, "messages under way"),
                marks(own, view, `mark-${rank}`)));
    });
    return section("timeline", "Ranks over time",
        `Hatched: MPI calls that a rank is in. Solid: messages that it sends or receives, as high as there are many under way in the mean of a bin (${digits(mostBusy)} at most). Gaps are empty. Thin bars are single messages, the slowest and one of each kind: open one. Drag over the lanes, or use the buttons above, to zoom. Calls are not filtered by what only messages have.`,
        el("div", { class: "timeline", "data-drag": "" }, axis(view), rows),
        ranks.length > LANES && el("p", {}, `${ranks.length - LANES} more ranks: filter by rank to see one.`));
}

function links(look) {
    const title = "Links over time";
    if (copies.rows === 0) return section("links", title, "No copies were recorded.");
    const view = look.filter.window;
    const key = (row) => { const one = data.links[copies.link[row]]; return `${linkName(one)}\n${one.path}`; };
    const busy = underWay(copies, look.copiesPass, (row) => [key(row)]);
    const sums = sumBy(copies, look.copiesPass, look.filter, key);
    const names = [...busy.keys()].sort((one, other) => (sums.get(other)?.bytes ?? 0) - (sums.get(one)?.bytes ?? 0));
    const most = Math.max(1e-9, ...[...busy.values()].map((one) => Math.max(...one.mean)));
    const rows = names.slice(0, LINKS_SHOWN).map((name) => {
        const [places, path] = name.split("\n");
        const sum = sums.get(name) ?? NOTHING;
        return el("div", { class: "row" },
            el("div", { class: "label" }, places, el("small", {}, `${path}, ${size(sum.bytes)}`)),
            el("div", { class: "lanes" }, lane(name.replace("\n", ", "), "copies " + path, busy.get(name).mean, most, view, "copies under way")));
    });
    return section("links", title,
        `Copies that are under way, in the mean of a bin (${digits(most)} at most). Gaps are empty.`,
        rows.length > 0 ? el("div", { class: "timeline", "data-drag": "" }, axis(view), rows) : el("p", {}, "No copies pass the filter."),
        names.length > LINKS_SHOWN && el("p", {}, `${names.length - LINKS_SHOWN} more links have fewer bytes: filter by place or rank to see them.`));
}

// By bytes, or by number.
function byWhat(look) {
    const choice = (by, text) => link({ by }, "by-" + by, { class: "choice", "aria-current": look.by === by && "true" }, text);
    return el("p", { class: "choices" }, "Count ", choice("bytes", "bytes"), choice("count", "messages"));
}

function matrix(look) {
    const traffic = new Map();
    for (const [name, sum] of look.pairs) {
        for (const rank of new Set(ends(name))) traffic.set(rank, (traffic.get(rank) ?? 0) + sum[look.by]);
    }
    const all = [...traffic.keys()].sort((one, other) => traffic.get(other) - traffic.get(one));
    const ranks = all.slice(0, RANKS_SHOWN).sort(inOrder);
    const most = Math.max(1, ...[...look.pairs.values()].map((sum) => sum[look.by]));
    const cell = (from, to) => {
        const sum = look.pairs.get(`${from} ${to}`);
        const name = `${rankName(from)}-${rankName(to)}`;
        if (!sum) return el("td", { class: "number none" }, "·");
        const said = `from ${rankName(from)} to ${rankName(to)}: ${count(sum.count)} messages, ${size(sum.bytes)}`;
        return el("td", { class: "number heat", style: { "--share": sum[look.by] / most } },
            link({ pair: name }, "pair-" + name, { "aria-label": said, title: said, "aria-current": state.pair === name && "true" },
                look.by === "bytes" ? sizeShort(sum.bytes) : short(sum.count)));
    };
    return section("matrix", "From rank to rank", "Rows send, columns receive. Open a pair to see the calls behind it.",
        byWhat(look),
        table(look.by === "bytes" ? "Bytes from rank to rank" : "Messages from rank to rank", ["from \\ to", ...ranks.map((rank) => ">" + rankName(rank))],
            ranks.map((from) => [rankName(from), ...ranks.map((to) => cell(from, to))]), { class: "matrix" }),
        all.length > ranks.length && el("p", {}, `${all.length - ranks.length} more ranks have less.`),
        pairCalls(look));
}

function pairCalls(look) {
    if (state.pair === undefined) return null;
    const found = [...look.pairs.keys()].find((name) => ends(name).map(rankName).join("-") === state.pair);
    const title = `Calls behind ${state.pair.replace("-", " → ")}`;
    if (!found) return el("p", { role: "status" }, `${title}: no message passes the filter.`);
    const [from, to] = ends(found);
    const own = look.pass.map((pass, row) => pass && messages.from[row] === from && messages.to[row] === to);
    const sums = sumBy(messages, own, look.filter, (row) => `${data.functions[messages.call[row]]}\n${data.protocols[messages.protocol[row]]}`);
    const sorted = [...sums].sort((one, other) => other[1][look.by] - one[1][look.by]);
    const most = sorted[0]?.[1][look.by] ?? 0;
    return el("div", { class: "detail" },
        table(title, ["call", "protocol", ">messages", ">bytes", ">mean time", ">" + look.by], sorted.map(([name, sum]) =>
            [...name.split("\n"), count(sum.count), size(sum.bytes), sum.timed > 0 ? time(Math.round(sum.ns / sum.timed)) : "–",
                bar(sum[look.by], most, percent(sum[look.by], sorted.reduce((all, one) => all + one[1][look.by], 0)))])),
        el("p", {}, link({ pair: "" }, "pair-close", {}, "Close")));
}

function processes(look) {
    const traffic = new Map();
    for (const [name, sum] of look.pairs) {
        for (const rank of ends(name)) traffic.set(rank, (traffic.get(rank) ?? 0) + sum[look.by]);
    }
    const chosen = [...traffic.keys()].sort((one, other) => traffic.get(other) - traffic.get(one)).slice(0, NODES_SHOWN).sort(inOrder);
    const arcs = [...look.pairs].map(([name, sum]) => {
        const [from, to] = ends(name);
        return { from, to, bytes: sum[look.by], text: amount(look, sum), title: `rank ${rankName(from)} → ${rankName(to)}: ${count(sum.count)} messages, ${size(sum.bytes)}` };
    });
    const nodes = chosen.map((rank) => ({ key: rank, name: `rank ${rankName(rank)}` }));
    return section("processes", "Processes", `Arcs are as wide as there are ${look.by === "bytes" ? "bytes" : "messages"}. The table of ranks has all numbers.`,
        nodes.length > 0 ? graph("Ranks and what they send to each other", nodes, arcs) : el("p", {}, "No message passes the filter."),
        traffic.size > chosen.length && el("p", {}, `${traffic.size - chosen.length} more ranks have less.`));
}

function devices(look) {
    const title = "Devices";
    if (copies.rows === 0) return section("devices", title, "No copies were recorded.");
    const sums = sumBy(copies, look.copiesPass, look.filter, (row) => copies.link[row]);
    const arcs = new Map();
    for (const [number, sum] of sums) {
        const one = data.links[number];
        const key = `${one.from} ${one.to} ${one.path}`;
        const arc = arcs.get(key) ?? { from: one.from, to: one.to, path: one.path, bytes: 0, count: 0, bend: { direct: 0, relay: 1, host: 2 }[one.path] ?? 0 };
        arc.bytes += sum.bytes;
        arc.count += sum.count;
        arcs.set(key, arc);
    }
    for (const arc of arcs.values()) {
        arc.text = size(arc.bytes);
        arc.title = `${linkName(arc)}, ${arc.path}: ${count(arc.count)} copies, ${size(arc.bytes)}`;
    }
    const used = [...new Set([...arcs.values()].flatMap((arc) => [arc.from, arc.to]))].sort((one, other) => one - other);
    const nodes = used.slice(0, NODES_SHOWN).map((place) => ({
        key: place, name: placeName(place), middle: data.places[place]?.name.startsWith("host"),
        title: data.places[place] ? `${placeName(place)} ${data.places[place].uuid} ${data.places[place].pci}` : "",
    }));
    const rows = [...sums].sort((one, other) => other[1].bytes - one[1].bytes).slice(0, LISTED).map(([number, sum]) => {
        const one = data.links[number];
        return [placeName(one.from), placeName(one.to), one.path, count(one.hop), count(sum.count), size(sum.bytes), time(Math.round(sum.ns / Math.max(1, sum.timed))), rate(sum.bytes, sum.ns)];
    });
    return section("devices", title, "Places that messages were copied between. Whole lines are direct copies, dashed ones hops over a relay, dotted ones go through host memory. Widths are bytes.",
        nodes.length > 0 ? graph("Places and what was copied between them", nodes, [...arcs.values()]) : el("p", {}, "No copies pass the filter."),
        rows.length > 0 && table("Copies by link", ["from", "to", "path", ">hop", ">copies", ">bytes", ">mean time", ">while copying"], rows));
}

// What the MPI library did with what it carries.
function ucxCalls(look) {
    const sums = new Map();
    for (const row of ucxPass(look.filter)) {
        const name = [row.name, row.fn, row.transports].join("\n");
        const sum = sums.get(name) ?? { ...row, count: 0, bytes: 0, ns: 0, underWay: 0 };
        for (const part of ["count", "bytes", "ns", "underWay"]) sum[part] += row[part];
        sums.set(name, sum);
    }
    const rows = [...sums.values()].sort((one, other) => other[look.by] - one[look.by]).slice(0, LISTED).map((sum) =>
        [sum.name, sum.fn, count(sum.count), size(sum.bytes), time(sum.ns), count(sum.underWay), sum.transports || "not known"]);
    return rows.length > 0 && table("Calls of UCX, by the MPI call that made them; filters of call, rank and size hold",
        ["MPI call", "UCX call", ">calls", ">bytes", ">time in them", ">left under way", "transports of the endpoint"], rows);
}

function contenders(look) {
    const sums = sumBy(messages, look.pass, look.filter, (row) =>
        [data.functions[messages.call[row]], data.protocols[messages.protocol[row]], routePath[messages.route[row]]].join("\n"));
    const sorted = [...sums].sort((one, other) => other[1][look.by] - one[1][look.by]);
    const rows = sorted.slice(0, LISTED).map(([name, sum]) => {
        const [call, protocol, path] = name.split("\n");
        return [link({ call, protocol, path }, "top-" + name, { title: "Only these" }, call), protocol, path,
            bar(sum.bytes, look.total.bytes, percent(sum.bytes, look.total.bytes)), bar(sum.count, look.total.count, percent(sum.count, look.total.count), "hatched"),
            count(sum.count), size(sum.bytes), time(sum.ns), sum.timed > 0 ? time(Math.round(sum.ns / sum.timed)) : "–"];
    });
    return section("contenders", "Top contenders", "Times are from offer to arrival. Together they may be longer than the job, as many messages are under way at once.",
        table("Messages by call, protocol and path", ["call", "protocol", "path", ">of bytes", ">of messages", ">messages", ">bytes", ">time together", ">mean time"], rows),
        functions(look), ucxCalls(look));
}

// All calls, also those that are of no message.
function functions(look) {
    const sums = sumBy(calls, look.callsPass, look.filter, (row) => data.functions[calls.call[row]]);
    const sorted = [...sums].sort((one, other) => other[1].ns - one[1].ns);
    const all = sorted.reduce((sum, one) => sum + one[1].ns, 0);
    return table("MPI calls that began in this time, of all kinds of buffers", ["call", ">calls", ">of the time", ">time together", ">mean time"],
        sorted.slice(0, LISTED).map(([name, sum]) => [name, count(sum.count), bar(sum.ns, all, percent(sum.ns, all), "hatched"), time(sum.ns), time(Math.round(sum.ns / sum.count))]));
}

function histograms(look) {
    const sizes = [...sumBy(messages, look.pass, look.filter, (row) => messages.size[row])].sort((one, other) => one[0] - other[0]);
    const most = (of, name) => Math.max(1, ...of.map((one) => one[1][name]));
    const sizeRows = sizes.map(([at, sum]) => [className(at), bar(sum.count, most(sizes, "count"), count(sum.count), "hatched"), bar(sum.bytes, most(sizes, "bytes"), size(sum.bytes)),
        sum.timed > 0 ? time(Math.round(sum.ns / sum.timed)) : "–", time(sum.longest), rate(sum.bytes, sum.ns)]);
    // Rates of cells, in powers of two of GB/s.
    const rateClass = (row) => (messages.ns[row] > 0 && messages.bytes[row] > 0 ? Math.floor(Math.log2(messages.bytes[row] / messages.ns[row])) : null);
    const rates = [...sumBy(messages, look.pass, look.filter, rateClass)].filter((one) => one[0] !== null).sort((one, other) => one[0] - other[0]);
    const bound = (at) => {
        const [by, unit] = at >= 0 ? [1, "GB/s"] : at >= -9 ? [1e3, "MB/s"] : [1e6, "kB/s"];
        return `${Number((2 ** at * by).toPrecision(3))} ${unit}`;
    };
    const rateRows = rates.map(([at, sum]) => [`${bound(at)} – <${bound(at + 1)}`, bar(sum.count, most(rates, "count"), count(sum.count), "hatched"), bar(sum.bytes, most(rates, "bytes"), size(sum.bytes))]);
    return section("sizes", "Sizes and rates", "A rate is bytes by time from offer to arrival, in the mean of the messages of one kind in one bin of time.",
        el("div", { class: "two" },
            table("Sizes", ["size", ">messages", ">bytes", ">mean time", ">longest", ">rate"], sizeRows),
            table("Rates", ["rate", ">messages", ">bytes"], rateRows)));
}

function list(look) {
    const rows = look.single.slice(0, LISTED).map((message) => [
        link({ message: message.number, view: "message" }, "list-" + message.number, {}, `message ${message.number}`),
        ms(message.begin), message.from ?? "?", message.to ?? "?", size(message.bytes), message.took === null ? "–" : time(message.took),
        message.took ? rate(message.bytes, message.took) : "–", data.functions[message.call], data.protocols[message.protocol], routePath[message.route]]);
    return section("list", "Single messages", `The page has ${count(single.length)} single messages: those that took longest, and one of each kind in each bin. ${count(look.single.length)} of them pass the filter.`,
        table(`The slowest ${Math.min(LISTED, look.single.length)} of them`, ["message", ">at, ms", ">from", ">to", ">size", ">took", ">rate", "call", "protocol", "path"], rows));
}
