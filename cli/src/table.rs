//! Text in columns.

/// Lines of columns, each as wide as its longest cell. A cell may have several lines.
pub fn format(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut lines: Vec<Vec<String>> = vec![header.iter().map(|&title| title.to_owned()).collect()];
    for row in rows {
        let cells: Vec<Vec<&str>> = row.iter().map(|cell| cell.lines().collect()).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
        for number in 0..height {
            lines.push(cells.iter().map(|cell| cell.get(number).copied().unwrap_or_default().to_owned()).collect());
        }
    }
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}", width = *width)).collect();
        text.push_str(padded.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "x\ny".into(), "1".into()], vec!["long".into(), "z".into(), String::new()]];
        assert_eq!(format(&["N", "V", "W"], &rows), "N     V  W\na     x  1\n      y\nlong  z\n");
    }
}
