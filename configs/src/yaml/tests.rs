use super::*;

fn said(text: &str) -> String {
    match parse(text) {
        Ok(entries) => table(&entries)
            .iter()
            .map(|(key, value)| {
                format!(
                    "{}={}",
                    key.get_ref(),
                    crate::values::found(value.get_ref())
                )
            })
            .collect::<Vec<_>>()
            .join(" "),
        Err(note) => format!("{}: {}", note.offset, note.message),
    }
}

#[test]
fn scalars_are_read_as_by_pyyaml_and_pydantic() {
    let numbers = "a: 1e-3\nb: 10_000\nc: .5\nd: 1.0e-12\ne: -3\nf: 400000\ng: '7'\n";
    assert_eq!(
        said(numbers),
        "a=0.001 b=10000 c=0.5 d=1e-12 e=-3 f=400000 g=the string \"7\""
    );
    assert_eq!(
        said("a: yes\nb: Off\nc: TRUE\nd: ~\ne:\nf: no way\n"),
        "a=true b=false c=true f=the string \"no way\""
    );
    assert_eq!(
        said("a: !!str 5\nb: [1, x, null]\nc: {d: 2}"),
        "a=the string \"5\" b=[1, the string \"x\"] c=a table"
    );
}

#[test]
fn invalid_yaml_is_reported_with_its_place() {
    for (text, told) in [
        ("", "0: expected keys"),
        ("- 1\n", "0: expected keys"),
        ("a: 1\na: 2\n", "5: found the key `a` twice"),
        ("a: !python/object:os.system 1\n", "the tag"),
        ("a: *b\n", "not YAML"),
        ("a: &x [*x]\n", "an alias of what it stands in"),
        ("a: [1\nb: 2", "not YAML"),
        ("a: 1\n---\nb: 2\n", "a second document"),
        ("<<: 1\n", "merge keys"),
        ("? [1]\n: 2\n", "expected a word for a key"),
    ] {
        assert!(said(text).contains(told), "{text:?}: {}", said(text));
    }
}

#[test]
fn aliases_of_aliases_are_bounded() {
    let mut text = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n".to_owned();
    for level in 1..10 {
        let aliases = vec![format!("*a{}", level - 1); 9].join(", ");
        text += &format!("a{level}: &a{level} [{aliases}]\n");
    }
    assert!(
        said(&text).contains("expected at most 100000 values"),
        "{}",
        said(&text)
    );
    let deep = format!("a: {}{}", "[".repeat(1000), "]".repeat(1000));
    assert!(said(&deep).contains("limit"), "{}", said(&deep));
    let mut text = "a0: &a0 [1]\n".to_owned();
    for level in 1..100 {
        text += &format!("a{level}: &a{level} [*a{}]\n", level - 1);
    }
    assert!(
        said(&text).contains("inside of each other"),
        "{}",
        said(&text)
    );
}

// 282 KB of these took 4 GB: a text was counted once, and copied for each alias.
#[test]
fn text_of_aliases_and_anchors_is_bounded() {
    let text = "x".repeat(200_000);
    let aliases = "*t, ".repeat(20_000);
    for hostile in [
        format!("a: &t {text}\nb: [{aliases}]\n"),
        format!("a: &t [{text}]\nb: [{aliases}]\n"),
        format!("a: &t {{k: {text}}}\nb: [{aliases}]\n"),
        // Each anchor is a copy of what is inside of it.
        format!(
            "a: {}{text}{}\n",
            (0..60).map(|n| format!("&a{n} [")).collect::<String>(),
            "]".repeat(60)
        ),
    ] {
        let said = said(&hostile);
        assert!(
            said.contains("expected at most 4194304 bytes of text, found more; aliases count wherever they stand"),
            "{}",
            &said[..said.len().min(300)]
        );
    }
    assert!(parse(&format!("a: &t {text}\nb: [*t, *t]\n")).is_ok());
}
