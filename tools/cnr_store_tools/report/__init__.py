"""``cnr report``: one HTML file about a store. `facts` reads, `charts` draws, `page` puts both together."""
