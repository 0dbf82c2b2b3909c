//! What the engines whose configuration is TOML share.

use anyhow::{Context, Result, bail};
use toml_edit::{DocumentMut, Item, Table};

/// Reads a document.
pub fn parse(text: &str) -> Result<DocumentMut> {
    text.parse().context("not readable as TOML")
}

/// A table by its path, made where it isn't there. Those on the way that are made have no header of their own.
pub fn table<'a>(document: &'a mut DocumentMut, path: &[&str]) -> Result<&'a mut Table> {
    let mut table = document.as_table_mut();
    for (depth, name) in path.iter().enumerate() {
        let item = table.entry(name).or_insert_with(|| {
            let mut new = Table::new();
            new.set_implicit(depth + 1 < path.len());
            Item::Table(new)
        });
        // `a = { b = 1 }` becomes a table with a header.
        if let Item::Value(value) = item
            && value.is_inline_table()
        {
            let inline = std::mem::take(item);
            *item = inline.into_table().map_or(Item::None, Item::Table);
        }
        table = match item {
            Item::Table(table) => table,
            _ => bail!("{} is not a table", path[..=depth].join(".")),
        };
    }
    Ok(table)
}

/// What a line that we changed ends in, before the value that it had.
const WAS: &str = "# gpufence, was: ";

/// Makes ours the default that `key` names, and keeps the one that was there.
pub fn set_default(table: &mut Table, key: &str, ours: &str) {
    table.set_implicit(false);
    let before = table.get(key).and_then(Item::as_str).map(str::to_owned);
    if before.as_deref() != Some(ours) {
        let mut name = toml_edit::Value::from(ours);
        name.decor_mut().set_suffix(format!(" {WAS}{}", before.unwrap_or_default()));
        table[key] = Item::Value(name);
    }
}

/// Takes back what [`set_default`] did.
pub fn restore_default(table: &mut Table, key: &str) {
    let ours = table.get(key).and_then(Item::as_value);
    let was = ours.and_then(|ours| ours.decor().suffix()?.as_str()?.split(WAS).nth(1).map(str::to_owned));
    match was.as_deref() {
        Some("") => {
            table.remove(key);
            let only_on_the_way = table.iter().all(|(_, item)| item.is_table());
            table.set_implicit(only_on_the_way);
        }
        Some(name) => table[key] = toml_edit::value(name.trim()),
        None => {}
    }
}

/// A table by its path, if it is there.
pub fn find<'a>(document: &'a mut DocumentMut, path: &[&str]) -> Option<&'a mut Table> {
    path.iter().try_fold(document.as_table_mut(), |table, name| table.get_mut(name)?.as_table_mut())
}

/// Takes out tables on the way that have nothing in them and no header.
pub fn prune(document: &mut DocumentMut, path: &[&str]) {
    for depth in (1..=path.len()).rev() {
        let (name, parents) = (path[depth - 1], &path[..depth - 1]);
        let Some(parent) = find(document, parents) else { continue };
        if parent.get(name).and_then(Item::as_table).is_some_and(|table| table.is_empty() && table.is_implicit()) {
            parent.remove(name);
        }
    }
}

/// The document's text; `None` where nothing is in it.
pub fn text(document: &DocumentMut) -> Option<String> {
    let text = document.to_string();
    (!text.trim().is_empty()).then_some(text)
}

/// Whether two texts say the same, however they are written. Tables with nothing in them say nothing.
pub fn same(a: &str, b: &str) -> bool {
    let plain = |text: &str| {
        let document = parse(text).ok()?;
        let mut lines = Vec::new();
        flatten("", document.as_item(), &mut lines);
        lines.sort();
        Some(lines)
    };
    matches!((plain(a), plain(b)), (Some(a), Some(b)) if a == b)
}

fn flatten(path: &str, item: &Item, lines: &mut Vec<String>) {
    if let Some(table) = item.as_table_like() {
        for (key, item) in table.iter() {
            flatten(&format!("{path}/{key}"), item, lines);
        }
    } else if let Some(tables) = item.as_array_of_tables() {
        for (number, table) in tables.iter().enumerate() {
            flatten(&format!("{path}/{number}"), &Item::Table(table.clone()), lines);
        }
    } else if let Some(value) = item.as_value() {
        let mut value = value.clone();
        value.decor_mut().clear();
        lines.push(format!("{path} = {value}"));
    }
}
