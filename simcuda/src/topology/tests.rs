use super::*;

#[test]
fn embedded_topologies_load() {
    for (name, _) in EMBEDDED {
        let (t, _) = Topology::load(name, None).unwrap();
        assert_eq!(&t.name, name);
    }
    assert_eq!(Topology::load("hgx-h200", Some(2)).unwrap().0.gpu.count, 2);
    assert!(Topology::load("hgx-h200", Some(9)).is_err());
}

/// Six NVLink2 a GPU: NVIDIA's V100 datasheet.
#[test]
fn every_v100_of_the_cube_mesh_has_six_links() {
    let (t, _) = Topology::load("dgx1-v100", None).unwrap();
    for g in 0..8 {
        let rate: f64 = t
            .link
            .iter()
            .filter(|l| l.gpus.contains(&g))
            .map(|l| l.gb_s)
            .sum();
        assert_eq!(rate, 6.0 * 24.0, "GPU {g}");
    }
}

/// DGX-1's block diagram: two GPUs at each of four switches, two switches at each processor. Where the tree is not known, it is
/// known all the same which GPUs are at different processors.
#[test]
fn gpus_hang_on_what_is_known_of_the_machine() {
    use Ancestor::{Bridge, Switch, System};
    let (dgx1, _) = Topology::load("dgx1-v100", None).unwrap();
    let of_0 = (1..8).map(|gpu| dgx1.ancestor(0, gpu));
    let expected = [Switch, Bridge, Bridge, System, System, System, System];
    assert_eq!(of_0.collect::<Vec<_>>(), expected.map(Some));
    assert_eq!(dgx1.ancestor(7, 6), Some(Switch));
    // A part of the node is where it is in the whole.
    let (two, _) = Topology::load("dgx1-v100", Some(2)).unwrap();
    assert_eq!(two.ancestor(0, 1), Some(Switch));
    assert_eq!([two.numa_node(0), two.numa_node(1)], [0, 0]);
    let (one, _) = Topology::load("dgx1-v100", Some(1)).unwrap();
    assert_eq!((one.pcie.switch.len(), one.pcie.bridge.len()), (1, 1));
    let (beluga, _) = Topology::load("beluga", None).unwrap();
    assert_eq!(beluga.ancestor(0, 1), None);
    assert_eq!(beluga.ancestor(1, 2), Some(System));
}

#[test]
fn every_value_cites_its_source() {
    for (name, text) in EMBEDDED {
        for line in text.lines().filter(|l| l.contains(" = ")) {
            let key = line.split(" = ").next().unwrap_or("");
            let exempt = line.starts_with('#')
                || (["name", "description", "gpus"].contains(&key) && !line.contains("NVIDIA"));
            assert!(exempt || line.contains("# source:"), "{name}: {line}");
        }
    }
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "a table of bad files and what is said"
)]
fn bad_files_say_what_is_wrong() {
    let good = EMBEDDED[0].1;
    let (before, rest) = good.split_once("[[link]]\ngpus = [0, 2]").unwrap();
    let (_, after) = rest.split_once("[[link]]").unwrap();
    let missing = format!("{before}[[link]]{after}");
    let error = Topology::parse("x", &missing).unwrap_err().to_string();
    assert!(
        error.contains("link between GPU 0 and 2 is missing"),
        "{error}"
    );
    // What is changed in a good file, and what is said of it: the field, and what to do.
    for (from, to, said) in [
        (
            "\ngb_s = 48.0",
            "\ngb_s = -48.0",
            "link between GPU 0 and 1: gb_s is -48, must be a positive rate in GB/s",
        ),
        (
            "\ngb_s = 48.0",
            "\ngb_s = nan",
            "gb_s is NaN, must be a positive rate in GB/s",
        ),
        (
            "\ngb_s = 48.0",
            "\n",
            "[[link]]: missing field `gb_s`; add it",
        ),
        (
            "\nlinks = 2",
            "\nlinks = 0",
            "link between GPU 0 and 1: links is 0, must be 1 to 64",
        ),
        (
            "\nlinks = 2",
            "\nlinks = -1",
            ", links of [[link]]: invalid value: integer `-1`",
        ),
        (
            "\ngpus = [0, 1]",
            "\ngpus = [0, 4]",
            "link between GPU 0 and 4: gpus must be two different ones of 0 to 3",
        ),
        (
            "\ngpus = [0, 1]",
            "\ngpus = [0, 2]",
            "link between GPU 0 and 2 is listed twice: take one [[link]] out",
        ),
        (
            "\nsetup_us = 2.5",
            "\nsetup_us = -2.5",
            "copy.setup_us is -2.5, must be 0 or more",
        ),
        (
            "\nsetup_us = 2.5",
            "\nsetup_us = \"2.5\"",
            ", setup_us of [copy]: invalid type",
        ),
        ("\nasync_us = ", "\nasync_us = -", "calls.async_us is -"),
        (
            "\nmemory_mib = 16160",
            "\nmemory_mib = 0",
            "gpu.memory_mib is 0, must be 1 to ",
        ),
        (
            "\nl2_mib = 6",
            "\nl2_mib = 4096",
            "gpu.l2_mib is 4096, must be 1 to 2047",
        ),
        (
            "\nhost_engines = 1",
            "\nhost_engines = 0",
            "copy.host_engines is 0, must be 1 to 64",
        ),
        (
            "kind = \"full-mesh\"",
            "kind = \"switch\"",
            "fabric.port_gb_s is missing: ",
        ),
        (
            "kind = \"full-mesh\"",
            "kind = \"switch\"\nport_gb_s = 0.0",
            "fabric.port_gb_s is 0, must be ",
        ),
        (
            "kind = \"full-mesh\"",
            "kind = \"switch\"\nport_gb_s = 9.0\nlinks = 0",
            "fabric.links is 0, must be ",
        ),
        (
            "kind = \"full-mesh\"",
            "kind = \"star\"",
            ", kind of [fabric]: unknown variant",
        ),
    ] {
        assert!(good.contains(from), "{from}");
        let error = Topology::parse("a.toml", &good.replacen(from, to, 1));
        let error = error.expect_err(said).to_string();
        assert!(error.contains(said), "{error}");
        assert!(
            error.starts_with("topology \"a.toml\"") && !error.contains('\n'),
            "{error}"
        );
    }
    // What is put before a good file's [host], of four GPUs at two processors.
    for (tree, said) in [
        (
            "[[pcie.switch]]\ngpus = [0, 4]",
            "pcie.switch of GPU 0, 4: there is no GPU 4, gpus must be of 0 to 3",
        ),
        (
            "[[pcie.switch]]\ngpus = [0, 1, 0]",
            "pcie.switch of GPU 0, 1, 0: GPU 0 is listed twice: take it out once",
        ),
        (
            "[[pcie.switch]]\ngpus = []",
            "gpus is empty, must list those under the switch",
        ),
        (
            "[[pcie.switch]]\ngpus = [1, 2]",
            "pcie.switch of GPU 1, 2: they are on NUMA nodes 0 and 1, but must be on one",
        ),
        (
            "[[pcie.switch]]\ngpus = [0, 1]\ngb_s = 0.0",
            "pcie.switch of GPU 0, 1: gb_s is 0, must be a positive rate in GB/s",
        ),
        (
            "[[pcie.switch]]\ngpus = [0, 1]\n[[pcie.switch]]\ngpus = [1, 0]",
            "pcie.switch of GPU 1, 0 is listed twice: take one",
        ),
        (
            "[[pcie.switch]]\ngpus = [0, 1]\n[[pcie.bridge]]\ngpus = [1]",
            "pcie.bridge of GPU 1 has a part of pcie.switch of GPU 0, 1",
        ),
        (
            "[[pcie.bridge]]\ngpus = [1]\n[[pcie.bridge]]\ngpus = [0, 1]",
            "pcie.bridge of GPU 0, 1: some are under another",
        ),
        (
            "[[pcie.bridge]]\ngpus = 1",
            ", gpus of [[pcie.bridge]]: invalid type",
        ),
        ("[[pcie.swich]]\ngpus = [0]", "unknown field `swich`"),
    ] {
        let text = good.replacen("\n[host]", &format!("\n{tree}\n[host]"), 1);
        let error = Topology::parse("a.toml", &text)
            .expect_err(said)
            .to_string();
        assert!(error.contains(said) && !error.contains('\n'), "{error}");
    }
    let one_node = good.replacen("numa_nodes = 2", "numa_nodes = 1", 1);
    for (sets, said) in [
        (
            &[&[0, 1, 2][..], &[2, 3]][..],
            "pcie.switch of GPU 2, 3 and pcie.switch of GPU 0, 1, 2 overlap: one must",
        ),
        (
            &[&[0], &[0, 1], &[0, 1, 2]],
            "pcie.switch: GPU 0 is under 3 switches, at most 2 are told apart",
        ),
    ] {
        let switch = |set: &&[i32]| format!("[[pcie.switch]]\ngpus = {set:?}\n");
        let tree: String = sets.iter().map(switch).collect();
        let text = one_node.replacen("\n[host]", &format!("\n{tree}[host]"), 1);
        let error = Topology::parse("a.toml", &text)
            .expect_err(said)
            .to_string();
        assert!(error.contains(said) && !error.contains('\n'), "{error}");
    }
    let error = Topology::load("beluga", Some(5)).unwrap_err().to_string();
    assert!(
        error.contains("has 4 GPUs, 5 asked for") && error.contains(": ask for 1 to 4"),
        "{error}"
    );
    let error = Topology::parse("x", "name = 3").unwrap_err().to_string();
    assert!(error.contains("line 1") && !error.contains('\n'), "{error}");
    assert!(Topology::load("/no/such/file", None).is_err());
}
