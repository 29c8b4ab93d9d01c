// One message, the sums for programs, and what happens when the address changes.

const PHASES = [
    ["posted", "matched", "waiting"], ["at", "matched", "waiting"], ["matched", "moving", "preparing"],
    ["moving", "landed", "moving"], ["landed", "done", "ending"],
];
const MEANING = { posted: "receive posted", at: "offered or claimed", matched: "matched", moving: "payload begins to move", landed: "payload has landed", done: "nothing is left to do" };

// A side of a message, or a copy, as bars over the message's own time.
function bars(label, parts, view) {
    const span = view.to - view.from || 1;
    return el("div", { class: "row" }, el("div", { class: "label" }, label),
        el("div", { class: "phases" }, parts.map(([begin, end, kind, text]) => el("span", {
            class: "phase " + kind, title: text,
            style: { left: (100 * (begin - view.from)) / span + "%", width: Math.max(0.3, (100 * (end - begin)) / span) + "%" },
        }, kind === "copy" ? null : kind))));
}

function phases(half) {
    const parts = [];
    for (const [from, to, kind] of PHASES) {
        if (from === "at" && half.posted !== null) continue;
        if (half[from] !== null && half[to] !== null && half[to] > half[from]) {
            parts.push([half[from], half[to], kind, `${kind}: ${time(half[to] - half[from])}`]);
        }
    }
    return parts;
}

function oneMessage() {
    if (state.message === undefined) return section("message", "One message", "Open a message in a timeline or in the list.");
    const message = singleByNumber.get(Number(state.message));
    const title = `Message ${state.message}`;
    if (!message) {
        return section("message", title, `This page does not have it: only the slowest, and one of each kind. All of them: anabranch trace FILE... --message ${state.message}`);
    }
    const [sender, receiver] = [side(message.sender), side(message.receiver)];
    const own = copiesOf(message);
    const times = [sender, receiver].filter(Boolean).flatMap((half) => STATES.map((name) => half[name])).filter((at) => at !== null);
    own.forEach((copy) => times.push(copy.begin - message.begin, copy.begin - message.begin + copy.took));
    const view = { from: Math.min(...times), to: Math.max(...times) };
    const wide = Math.max(view.to - view.from, 1000);
    const around = { from: ms(Math.max(0, message.begin + view.from - wide / 4)), to: ms(message.begin + view.to + wide / 4) };
    const byLink = new Map();
    for (const copy of own) {
        const name = `${linkName(copy.link)}, ${copy.link.path}`;
        byLink.set(name, [...(byLink.get(name) ?? []), copy]);
    }
    const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    const call = (half) => (half ? `${half.function} (call ${half.call % 2 ** 32} of thread ${Math.floor(half.call / 2 ** 32)})` : "not recorded");
    const off = message.predicted && message.took ? ` (it took ${percent(message.took, message.predicted)} of that)` : "";
    const at = (half, name) => (half === null || half[name] === null ? "–" : time(half[name]));
    return section("message", title, null,
        el("dl", { class: "facts" },
            fact("from", `rank ${message.from ?? "?"}`), fact("to", `rank ${message.to ?? "?"}`), fact("size", `${size(message.bytes)} (${count(message.bytes)} B)`),
            fact("tag", String(message.tag)), fact("communicator", message.communicator), fact("protocol", data.protocols[message.protocol]), fact("path", routePath[message.route]),
            fact("carried by", message.isByMpi ? "the MPI library" : "Anabranch"), fact("begins", `${ms(message.begin)} ms`),
            fact("took", message.took === null ? "it did not arrive" : `${time(message.took)}, ${rate(message.bytes, message.took)}`),
            message.predicted && fact("predicted", time(message.predicted) + off),
            fact("sent by", call(sender)), fact("received by", call(receiver))),
        el("p", {}, link({ ...around, view: "timeline" }, "message-around", {}, "Show it among the others"), " ", link({ message: "" }, "message-close", {}, "Close")),
        el("div", { class: "timeline" }, axis({ from: message.begin + view.from, to: message.begin + view.to || 1 }),
            sender && bars("sender", phases(sender), view), receiver && bars("receiver", phases(receiver), view),
            [...byLink].slice(0, 40).map(([name, all]) => bars(name, all.map((copy) =>
                [copy.begin - message.begin, copy.begin - message.begin + copy.took, "copy", `chunk ${copy.chunk}: ${size(copy.bytes)}, ${time(copy.took)}`]), view))),
        table("When, after its begin", ["state", ">sender", ">receiver"], STATES.map((name) => [MEANING[name], at(sender, name), at(receiver, name)])),
        own.length > 0 ? table("Its copies", ["link", "path", ">hop", ">chunk", ">bytes", ">launched", ">took", ">uncertain", "by", ">rank"], own.slice(0, 500).map((copy) =>
            [linkName(copy.link), copy.link.path, count(copy.link.hop), count(copy.chunk), size(copy.bytes), time(copy.begin - message.begin), time(copy.took), time(copy.uncertain), copy.by, count(copy.rank)]))
        : el("p", {}, data.copies_left_out > 0 ? "This page has none of its copies: those of slower messages are there." : "No copies were recorded."));
}

// What the views show together, for tests and other programs.
function writeSums(look) {
    const { filter } = look;
    const by = (key) => Object.fromEntries([...sumBy(messages, look.pass, filter, key)].map(([name, sum]) => [name, [sum.count, sum.bytes]]));
    const copied = sumBy(copies, look.copiesPass, filter, (row) => linkName(data.links[copies.link[row]]));
    const sums = {
        filter: {
            from_ns: filter.first * data.width_ns, to_ns: (filter.last + 1) * data.width_ns, is_last: filter.last === data.bins - 1,
            min_bytes: leastOf(filter.least), max_bytes: mostOf(filter.most),
        },
        messages: look.total.count,
        bytes: look.total.bytes,
        timed: look.total.timed,
        took_ns: look.total.ns,
        longest_ns: look.total.longest,
        by_call: by((row) => data.functions[messages.call[row]]),
        by_protocol: by((row) => data.protocols[messages.protocol[row]]),
        by_path: by((row) => routePath[messages.route[row]]),
        by_pair: by((row) => `${rankName(messages.from[row])}-${rankName(messages.to[row])}`),
        by_size: by((row) => leastOf(messages.size[row])),
        ucx: ucxPass(filter).reduce(([many, bytes], row) => [many + row.count, bytes + row.bytes], [0, 0]),
        by_link: Object.fromEntries([...copied].map(([name, sum]) => [name, [sum.count, sum.bytes]])),
    };
    document.getElementById("sums").textContent = JSON.stringify(sums).replaceAll("<", "\\u003c");
}

const form = document.getElementById("filter");

function choices(select, all, every) {
    const place = form.elements[select];
    place.replaceChildren(...(every === null ? [] : [el("option", { value: "" }, every)]), ...all.map(([value, text]) => el("option", { value }, text)));
}

function setUp() {
    const used = (column) => [...new Set(column)].sort(inOrder);
    const byName = (names) => names.sort().map((name) => [name, name]);
    const both = new Set([...messages.call, ...calls.call]);
    choices("call", byName([...both].map((at) => data.functions[at])), "all");
    choices("protocol", byName(used(messages.protocol).map((at) => data.protocols[at])), "all");
    choices("path", byName([...new Set(messages.route.map((at) => routePath[at]))]), "all");
    const ranks = used([...messages.from, ...messages.to, ...calls.from]);
    choices("rank", ranks.map((rank) => (rank === UNKNOWN ? ["?", "not known"] : [String(rank * step), rankName(rank)])), "all");
    choices("place", data.places.map((place, at) => [String(at), placeName(at)]), data.places.length > 0 ? "all" : NOT_RECORDED);
    const sizes = used(messages.size);
    choices("min", sizes.map((at) => [String(leastOf(at)), size(leastOf(at))]), "any");
    choices("max", sizes.map((at) => [String(mostOf(at)), at <= 1 ? size(mostOf(at)) : "<" + size(2 ** at)]), "any");
    const list = ["timeline", "links", "matrix", "processes", "devices", "contenders", "sizes", "list", "message", "notes"];
    const names = ["Ranks over time", "Links over time", "Rank to rank", "Processes", "Devices", "Top contenders", "Sizes and rates", "Single messages", "One message", "Advice and notes"];
    document.getElementById("views").replaceChildren(...list.map((view, at) => el("a", { href: hashWith({ view }), "data-view": view }, names[at])));
    const hostNames = new Set(data.ranks.map((rank) => rank.host));
    const where = hostNames.size === 1 ? [...hostNames][0] : `${hostNames.size} hosts`;
    document.getElementById("about").textContent = `${count(data.ranks.length)} rank${data.ranks.length === 1 ? "" : "s"} on ${where}, ${time(data.span_ns)}, anabranch ${data.version}`;
    form.addEventListener("change", (event) => go({ [event.target.name]: event.target.value.trim() }));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(button.dataset.zoom)));
    window.addEventListener("hashchange", show);
    // The same address again is no change, but the reader may have scrolled away.
    document.getElementById("views").addEventListener("click", (event) => event.target.hash === location.hash && goTo(event.target.dataset.view));
    document.getElementById("main").addEventListener("pointerdown", drag);
}

function zoom(how) {
    const { from, to } = applied().window;
    const end = data.bins * data.width_ns;
    const [middle, half] = [(from + to) / 2, (to - from) / 2];
    const move = { earlier: [from - half, to - half], later: [from + half, to + half], in: [middle - half / 2, middle + half / 2], out: [middle - 2 * half, middle + 2 * half] }[how];
    if (!move) return go(Object.fromEntries(FILTERS.map((name) => [name, ""])));
    const begin = Math.max(0, Math.min(move[0], end - (move[1] - move[0])));
    const until = Math.min(end, begin + Math.max(100, move[1] - move[0]));
    const isAll = begin < data.width_ns / 100 && end - until < data.width_ns / 100;
    return go(isAll ? { from: "", to: "" } : { from: ms(begin), to: ms(until) });
}

// From where the pointer goes down to where it goes up.
function drag(event) {
    const place = event.target.closest("[data-drag]")?.querySelector(".lanes");
    if (!place || event.button !== 0 || event.target.closest("a, .label")) return;
    const box = place.getBoundingClientRect();
    const { from, to } = applied().window;
    const at = (x) => from + Math.max(0, Math.min(1, (x - box.left) / box.width)) * (to - from);
    const mark = el("div", { class: "dragged", "aria-hidden": "true" });
    const end = (last) => {
        window.removeEventListener("pointermove", move);
        mark.remove();
        const [begin, until] = [at(event.clientX), at(last.clientX)].sort((one, other) => one - other);
        if (Math.abs(last.clientX - event.clientX) > 5) go({ from: ms(begin), to: ms(until) });
    };
    const move = (now) => {
        const [left, right] = [event.clientX, now.clientX].sort((one, other) => one - other);
        mark.style.left = left + "px";
        mark.style.width = right - left + "px";
    };
    const whole = event.target.closest("[data-drag]").getBoundingClientRect();
    mark.style.top = whole.top + "px";
    mark.style.height = whole.height + "px";
    document.body.append(mark);
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, { once: true });
}

function showFilter(shown) {
    for (const name of FILTERS) {
        const place = form.elements[name];
        place.value = state[name] ?? "";
        // A size or a rank of the address need not be among the choices: that of its bin is.
        if (place.tagName === "SELECT" && place.selectedIndex < 0) {
            const at = name === "min" ? leastOf(shown.filter.least) : name === "max" ? mostOf(shown.filter.most) : name === "rank" ? shown.filter.rank * step : state[name];
            if (![...place.options].some((option) => option.value === String(at))) place.append(el("option", { value: at }, name === "min" || name === "max" ? size(at) : String(at)));
            place.value = String(at);
        }
    }
    const { first, last } = shown.filter;
    const whole = sumBy(messages, new Uint8Array(messages.rows).fill(1), { first: 0, last: data.bins - 1 }, () => 0).get(0) ?? NOTHING;
    document.getElementById("shown").textContent =
        `${count(shown.total.count)} of ${count(whole.count)} messages, ${size(shown.total.bytes)} of ${size(whole.bytes)}, that began from ${ms(first * data.width_ns)} to ${ms(Math.min((last + 1) * data.width_ns, data.span_ns))} ms. ` +
        `Filters go to the borders of bins: ${time(data.width_ns)} of time, powers of two of bytes.`;
}

function goTo(view) {
    const title = document.getElementById("title-" + view);
    title?.focus({ preventScroll: true });
    title?.scrollIntoView();
}

let viewShown;

function show() {
    state = readState();
    const shown = look();
    // In a timeline also those are seen that began earlier.
    shown.window = singlePass({ ...shown.filter, first: 0, last: data.bins - 1 });
    const key = document.activeElement?.dataset?.key;
    document.getElementById("main").replaceChildren(
        tiles(shown), timeline(shown), links(shown),
        el("div", { class: "two" }, matrix(shown), processes(shown)),
        devices(shown), contenders(shown), histograms(shown), list(shown), oneMessage(), stands(shown));
    document.querySelectorAll("#views a").forEach((one) => one.setAttribute("href", hashWith({ view: one.dataset.view })));
    showFilter(shown);
    writeSums(shown);
    const wanted = state.view + " " + state.message;
    if (state.view !== undefined && wanted !== viewShown) {
        goTo(state.view);
    } else if (key !== undefined) {
        document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
    }
    viewShown = wanted;
}

setUp();
show();
document.body.dataset.state = "ready";
